"""The method itself, in a few short functions; each matrix of a parameter is updated alone.

Letters: ``B x m x n`` the matrices of one part of a parameter, see `dmuon.layout`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dmuon.batching import orthogonalize_all
from dmuon.layout import Layout

# Updates and their orthogonal matrices live beside weights and momentum: two copies of this many
# elements at a time (256 MiB each in float32), or of one parameter that is larger.
CHUNK_NUMEL = 2**26

ADJUST_LR_FNS = ("match_rms_adamw", "original", None)


def lr_scale(shape: Sequence[int], adjust_lr_fn: str | None) -> float:
    """Factor on the learning rate of an ``M x N`` matrix.

    ``match_rms_adamw``: ``0.2 sqrt(max(M, N))`` (Moonshot, arXiv 2502.16982), so that updates have
    AdamW's usual size; ``original``: ``sqrt(max(1, M / N))`` (Jordan et al. 2024); None: 1.
    """
    rows, columns = shape[-2:]
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 1.0


class Due(NamedTuple):
    """One parameter that is to be updated; the tensors are shaped as the parameter.

    Attributes:
        weight: the float32 master weight.
        grad: the mean gradient.
        momentum_buffer: of the last step, zeros before the first; float32.
        layout: where its matrices are.
    """

    weight: torch.Tensor
    grad: torch.Tensor
    momentum_buffer: torch.Tensor
    layout: Layout


def update_(params: Sequence[Due], group: Mapping[str, Any]) -> int:
    """One Muon step of ``params``, in place on weights and momentum.

    Args:
        params: of one parameter group; what is computed for one does not depend on the others.
        group: the settings of the group.

    Returns:
        How many matrices were orthogonalised.
    """
    parts_Bmn = [part for due in params for part in due.layout.views(_momentum_(due, group))]
    orthogonals_Bmn = orthogonalize_all(
        parts_Bmn,
        steps=group["ns_steps"],
        coefficients=group["ns_coefficients"],
        dtype=group["ns_dtype"],
        eps=group["eps"],
    )
    weights_Bmn = [part for due in params for part in due.layout.views(due.weight)]
    lr = float(group["lr"])
    for weight_Bmn, orthogonal_Bmn in zip(weights_Bmn, orthogonals_Bmn, strict=True):
        scale = lr_scale(weight_Bmn.shape, group["adjust_lr_fn"])
        weight_Bmn.mul_(1 - lr * group["weight_decay"])
        weight_Bmn.add_(orthogonal_Bmn.to(weight_Bmn.dtype), alpha=-lr * scale)
    return sum(len(weight_Bmn) for weight_Bmn in weights_Bmn)


def chunks(params: Sequence[Due]) -> Iterator[list[Due]]:
    """``params`` in order, some at a time: what one ``update_`` may hold in memory."""
    chunk: list[Due] = []
    numel = 0
    for due in params:
        if chunk and numel + due.weight.numel() > CHUNK_NUMEL:
            yield chunk
            chunk, numel = [], 0
        chunk.append(due)
        numel += due.weight.numel()
    if chunk:
        yield chunk


def _momentum_(due: Due, group: Mapping[str, Any]) -> torch.Tensor:
    """Advance the momentum; what is to be orthogonalised."""
    momentum = group["momentum"]
    due.momentum_buffer.mul_(momentum).add_(due.grad)
    if group["nesterov"]:
        return torch.add(due.grad, due.momentum_buffer, alpha=momentum)
    return due.momentum_buffer
