"""Names of the original model, whatever wraps it now."""

_EXTRA_STATE = "_extra_state"  # torch's name for what get_extra_state of a module returns
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def original_name(name: str) -> str:
    """``name`` without the parts that ``torch.compile`` and checkpoint wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_extra_state(name: str) -> bool:
    """Whether a name is that of what ``get_extra_state`` of a module returns."""
    return name.rpartition(".")[2] == _EXTRA_STATE
