"""Which parameters are hidden matrices, and what is refused."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dmuon.errors import SetupError
from dmuon.names import original_name
from dmuon.parameter import DedicatedParam

Predicate = Callable[[str, nn.Parameter], bool]

_EMBEDDINGS = ("embed", "wte", "wpe")
_HEADS = ("lm_head", "head", "output", "classifier", "score", "unembed")


def is_hidden_matrix(name: str, param: nn.Parameter) -> bool:
    """The default choice: matrices, but no embedding and no output head.

    Embeddings are told by a part of the name that contains ``embed`` or is ``wte`` or ``wpe``;
    heads by a name outside any numbered layer such as ``lm_head`` or ``head``.
    (Jordan et al. 2024, "Muon": first and last layers belong to AdamW.)
    """
    parts = name.split(".")
    if param.ndim != 2 or any(_EMBEDDINGS[0] in part or part in _EMBEDDINGS for part in parts):
        return False
    is_in_a_layer = any(part.isdigit() for part in parts)
    return is_in_a_layer or not any(part in _HEADS for part in parts)


def select(model: nn.Module, predicate: Predicate) -> list[DedicatedParam]:
    """The dedicated parameters of ``model`` in its order, without owners yet.

    Raises:
        SetupError: when nothing matches, or something that Muon cannot orthogonalise does.
    """
    chosen: dict[nn.Parameter, DedicatedParam] = {}
    embedded = _embedding_weights(model) if predicate is is_hidden_matrix else set()
    for module_name, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if param is None:
                continue
            name = original_name(f"{module_name}.{attribute}" if module_name else attribute)
            if param in chosen:
                chosen[param].sites.append((module, attribute))
                chosen[param].aliases.append(name)
            elif param not in embedded and predicate(name, param):
                _check(name, param)
                site = [(module, attribute)]
                chosen[param] = DedicatedParam(name, site, param.shape, param.dtype, owner=-1)
    if not chosen:
        raise SetupError(
            "the predicate matches no parameter of this model; print the names with "
            "model.named_parameters() and pass predicate=lambda name, param: ..."
        )
    return list(chosen.values())


def _embedding_weights(model: nn.Module) -> set[torch.Tensor]:
    return {m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}


def _check(name: str, param: nn.Parameter) -> None:
    if isinstance(param, DTensor):
        raise SetupError(
            f"{name} is sharded already; call dedicate_params before fully_shard, so that its "
            "owner gets the whole matrix"
        )
    if param.ndim != 2 or param.numel() == 0:
        raise SetupError(
            f"{name} has shape {tuple(param.shape)}; Muon orthogonalises matrices with two "
            "dimensions. Leave it out of the predicate, AdamW then takes it"
        )
    if not param.is_floating_point() or param.dtype == torch.float64:
        raise SetupError(
            f"{name} is {param.dtype}; dedicated parameters are float32, bfloat16 or float16. "
            "Convert the model, or leave it out of the predicate"
        )
