"""The update of one matrix; the method itself in two short functions."""

import math

import torch

from dmuon.newton_schulz import Coefficients, newton_schulz

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
    *,
    lr: float | torch.Tensor,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    ns_steps: int,
    ns_coefficients: Coefficients,
    ns_dtype: torch.dtype | None,
    adjust_lr_fn: str | None,
    eps: float,
) -> None:
    """One Muon step of one ``M x N`` matrix, in place on the float32 weight and momentum."""
    momentum_buffer.mul_(momentum).add_(grad)
    update = torch.add(grad, momentum_buffer, alpha=momentum) if nesterov else momentum_buffer
    orthogonal = newton_schulz(
        update, steps=ns_steps, coefficients=ns_coefficients, dtype=ns_dtype, eps=eps
    )
    step = float(lr)
    weight.mul_(1 - step * weight_decay)
    weight.add_(orthogonal.to(weight.dtype), alpha=-step * lr_scale(weight.shape, adjust_lr_fn))
