"""Which parameters are hidden matrices, how those are split, and what is refused."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dmuon.errors import SetupError
from dmuon.layout import Layout, Split, make_layout, site_of
from dmuon.names import original_name
from dmuon.parameter import DedicatedParam

Predicate = Callable[[str, nn.Parameter], bool]
Splits = Callable[[str, nn.Parameter], Split | None]

_EMBEDDINGS = ("embed", "wte", "wpe")
_HEADS = ("lm_head", "head", "heads", "output", "classifier", "score", "unembed")
_HEAD_MODULES = ("decoder", "proj_out", "qa_outputs", "seq_relationship", "logits", "to_logits")


def is_hidden_matrix(name: str, param: nn.Parameter) -> bool:
    """The default choice: matrices, stacks of experts and convolutions of the hidden layers.

    Two dimensions: every matrix but embeddings, output heads, biases (those of stacked experts are
    ``(E, n)``) and ``A_log``, the decay rates of a state-space model, which act element by element.
    Embeddings are told by a part of the name that contains ``embed`` or is ``wte`` or ``wpe``;
    heads by a part of the name such as ``lm_head`` or ``head``, or by a module of their own called
    ``decoder`` (BERT), ``proj_out`` (Whisper) or the like, or ``fc`` at the top (ResNet); all
    outside any numbered layer. Look at ``print(dmuon.describe(model))``.
    (Jordan et al. 2024, "Muon": first and last layers belong to AdamW.)

    More dimensions: the same, in numbered layers alone and with more than one entry in both of the
    first two, which leaves class tokens ``(1, 1, D)``, position tables ``(1, N, D)``, stems and
    depthwise convolutions ``(D, 1, k)`` to AdamW. Routers ``(E, D)`` are matrices like others.
    """
    return why_not_hidden(name, param) is None


def why_not_hidden(name: str, param: nn.Parameter) -> str | None:
    """Why `is_hidden_matrix` leaves this parameter to AdamW; None: it does not."""
    parts = name.split(".")
    is_in_a_layer = any(part.isdigit() for part in parts)
    reason = None
    if param.ndim < 2:
        reason = "fewer than two dimensions"
    elif any(_EMBEDDINGS[0] in part or part in _EMBEDDINGS for part in parts):
        reason = "an embedding"
    elif not is_in_a_layer and _is_head(parts):
        reason = "an output head"
    elif "bias" in parts[-1]:
        reason = "a bias"
    elif parts[-1] == "A_log":
        reason = "acts element by element"
    elif param.ndim > 2 and not is_in_a_layer:
        reason = "more than two dimensions outside numbered layers"
    elif param.ndim > 2 and min(param.shape[:2]) < 2:
        reason = "a leading dimension of one (token, position table, depthwise convolution)"
    return reason


def _is_head(parts: list[str]) -> bool:
    is_module_of_head = len(parts) > 1 and parts[-2] in _HEAD_MODULES
    return is_module_of_head or parts[:-1] == ["fc"] or any(part in _HEADS for part in parts)


@dataclass
class _Candidate:
    """One parameter under all its names; more than one where it is tied."""

    param: nn.Parameter
    names: list[str] = field(default_factory=list)
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)


def select(
    model: nn.Module, predicate: Predicate | None, splits: Splits | None = None
) -> list[DedicatedParam]:
    """The dedicated parameters of ``model`` in its order, without owners yet; None: there are none.

    Raises:
        SetupError: when nothing matches, something that Muon cannot orthogonalise does, or a split
            does not fit.
    """
    if predicate is None:
        return []
    modules = list(model.named_modules(remove_duplicate=False))
    candidates = _candidates(modules)
    is_default = predicate is is_hidden_matrix
    embedded = embedding_weights(module for _, module in modules) if is_default else set()
    selected: list[DedicatedParam] = []
    for candidate in candidates:
        is_chosen = candidate.param not in embedded and _is_chosen(candidate, predicate)
        split = None if splits is None else _split_of(candidate, splits, is_chosen)
        if is_chosen and (not is_default or _has_layout(candidate)):
            selected.append(_dedicated(candidate, split))
    if not selected:
        raise SetupError(
            "the predicate matches no parameter of this model; print the names with "
            "model.named_parameters() and pass predicate=lambda name, param: ..., or None to leave "
            "all of them to AdamW"
        )
    return selected


def _candidates(modules: Iterable[tuple[str, nn.Module]]) -> list[_Candidate]:
    """Every parameter once; names include those of modules that are registered twice."""
    found: dict[nn.Parameter, _Candidate] = {}
    for module_name, module in modules:
        for attribute, param in module._parameters.items():
            if param is None:
                continue
            candidate = found.setdefault(param, _Candidate(param))
            name = f"{module_name}.{attribute}" if module_name else attribute
            candidate.names.append(original_name(name))
            if (module, attribute) not in candidate.sites:
                candidate.sites.append((module, attribute))
    return list(found.values())


def _is_chosen(candidate: _Candidate, predicate: Predicate) -> bool:
    """Whether the predicate takes the parameter, under each of its names alike."""
    answers = {name: bool(predicate(name, candidate.param)) for name in candidate.names}
    taken = [name for name, is_taken in answers.items() if is_taken]
    if not taken or len(taken) == len(answers):
        return bool(taken)
    if predicate is is_hidden_matrix:
        return False
    left = next(name for name, is_taken in answers.items() if not is_taken)
    raise SetupError(
        f"{taken[0]} and {left} are one tied parameter, but the predicate takes the first and "
        "leaves the second; it must answer both names alike"
    )


def _split_of(candidate: _Candidate, splits: Splits, is_chosen: bool) -> Split | None:
    declared: dict[Split, str] = {}
    for name in candidate.names:
        split = splits(name, candidate.param)
        if not isinstance(split, Split | None):
            raise SetupError(
                f"splits returned {split!r} for {name}; it must return a dmuon.Split or None"
            )
        if split is not None:
            declared.setdefault(split, name)
    if declared and not is_chosen:
        raise SetupError(
            f"splits declares {next(iter(declared))} for {next(iter(declared.values()))}, which is "
            "not dedicated: the predicate does not choose it; return None for it, or choose it"
        )
    if len(declared) > 1:
        raise SetupError(
            f"splits declares {declared} for one tied parameter; it must answer all names alike"
        )
    return next(iter(declared), None)


def layout_of(
    name: str, param: nn.Parameter, modules: Sequence[nn.Module], split: Split | None = None
) -> Layout:
    """Where the matrices of a parameter are, which ``modules`` register.

    Raises:
        SetupError: where no rule says what its matrices are, or the split does not fit.
    """
    return make_layout(name, tuple(param.shape), [site_of(m) for m in modules], split)


def _has_layout(candidate: _Candidate) -> bool:
    """Whether a rule says what its matrices are; the default choice passes over all others."""
    try:
        layout_of(candidate.names[0], candidate.param, [module for module, _ in candidate.sites])
    except SetupError:
        return False
    return True


def _dedicated(candidate: _Candidate, split: Split | None) -> DedicatedParam:
    name, *aliases = candidate.names
    param = candidate.param
    _check(name, param)
    layout = layout_of(name, param, [module for module, _ in candidate.sites], split)
    return DedicatedParam(
        name, candidate.sites, param.shape, param.dtype, owner=-1, layout=layout, aliases=aliases
    )


def embedding_weights(modules: Iterable[nn.Module]) -> set[torch.Tensor]:
    """What those of ``modules`` hold that are embeddings, whatever it is called."""
    return {m.weight for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)}


def _check(name: str, param: nn.Parameter) -> None:
    if isinstance(param, DTensor):
        raise SetupError(
            f"{name} is sharded already; call dedicate_params before fully_shard, so that its "
            "owner gets the whole matrix"
        )
    if not param.is_floating_point() or param.dtype == torch.float64:
        raise SetupError(
            f"{name} is {param.dtype}; dedicated parameters are float32, bfloat16 or float16. "
            "Convert the model, or leave it out of the predicate"
        )
