"""Weights that are one tensor under several names: a safetensors file holds them once."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def untie(
    model_sd: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Leave out every name of a weight but its first.

    Weights are tied when they share their memory, or when ``config`` says so and their values are
    the same bits: state dicts may hold copies.

    Args:
        model_sd: The model's state dict.
        config: The model's ``config.json``; ``transformers`` ties by it when it loads.

    Returns:
        The tensors to write, and ``{name left out: name kept}``.
    """
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    for name in sorted(model_sd, key=lambda name: name == HEAD):  # the head is the one left out
        tensor = model_sd[name]
        first = names.setdefault(_memory(tensor), name)
        if first != name and tensor.numel() > 0:
            tied[name] = first
        elif _is_tied_head(name, model_sd, config):
            tied[name] = EMBEDDING
        else:
            kept[name] = tensor
    return kept, tied


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _is_tied_head(name: str, model_sd: Mapping[str, Tensor], config: Mapping[str, Any]) -> bool:
    if name != HEAD or EMBEDDING not in model_sd or not config.get("tie_word_embeddings"):
        return False
    return torch.equal(model_sd[HEAD], model_sd[EMBEDDING])
