"""The update of one matrix; the method itself in two short functions."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from dmuon.newton_schulz import newton_schulz

ADJUST_LR_FNS = ("match_rms_adamw", "original", None)


def lr_scale(shape: torch.Size, adjust_lr_fn: str | None) -> float:
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


def update_matrix_(
    weight: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor,
    group: Mapping[str, Any],
) -> None:
    """One Muon step of one ``M x N`` matrix, in place on the float32 weight and momentum.

    Args:
        weight: the master weight.
        grad: the mean gradient.
        momentum_buffer: of the last step, zeros before the first.
        group: the settings of its parameter group.
    """
    momentum = group["momentum"]
    momentum_buffer.mul_(momentum).add_(grad)
    if group["nesterov"]:
        update = torch.add(grad, momentum_buffer, alpha=momentum)
    else:
        update = momentum_buffer
    orthogonal = newton_schulz(
        update,
        steps=group["ns_steps"],
        coefficients=group["ns_coefficients"],
        dtype=group["ns_dtype"],
        eps=group["eps"],
    )
    lr = float(group["lr"])
    scale = lr_scale(weight.shape, group["adjust_lr_fn"])
    weight.mul_(1 - lr * group["weight_decay"])
    weight.add_(orthogonal.to(weight.dtype), alpha=-lr * scale)
