"""Names of the original model, whatever wraps it now."""

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def original_name(name: str) -> str:
    """``name`` without the parts that ``torch.compile`` and checkpoint wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
