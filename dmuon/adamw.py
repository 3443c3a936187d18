"""AdamW for symmetric parameters: torch's arithmetic, on what this rank holds of each of them."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

State = MutableMapping[torch.Tensor, dict[str, Any]]


def adamw_(group: Mapping[str, Any], state: State) -> None:
    """One step of ``torch.optim.AdamW`` for a parameter group, in place.

    The state is that of ``torch.optim.AdamW``, moments sharded as their parameter. The step itself
    works on local tensors: it is elementwise, and a ``DTensor`` costs the host several times as
    much as these small parameters cost the device.

    Args:
        group: with the keys of a group of ``torch.optim.AdamW``.
        state: by parameter; made here at its first gradient.
    """
    present = [param for param in group["params"] if param.grad is not None]
    states = [_state_of(param, state) for param in present]
    params = [_local(param) for param in present]
    grads = [_local(param.grad) for param in present]
    means = [_local(each["exp_avg"]) for each in states]
    squares = [_local(each["exp_avg_sq"]) for each in states]
    beta1, beta2 = group["betas"]
    adamw(
        params,
        grads,
        means,
        squares,
        [],  # of amsgrad
        [each["step"] for each in states],
        foreach=group["foreach"],
        capturable=group["capturable"],
        differentiable=group["differentiable"],
        fused=_fused(group, list(zip(params, grads, means, squares, strict=True))),
        has_complex=any(param.is_complex() for param in params),
        amsgrad=group["amsgrad"],
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _fused(group: Mapping[str, Any], tensors: Sequence[tuple[torch.Tensor, ...]]) -> bool | None:
    """What the group says; where it leaves the choice to torch, one pass over memory on CPUs.

    There that takes a quarter of the time of torch's default, a pass for each operation. It takes
    numbers in the order of memory, so all that it reads has to be laid out alike.

    Args:
        group: as of `adamw_`.
        tensors: what is read for each parameter, itself first.
    """
    fused: bool | None = group["fused"]
    is_open = fused is None and group["foreach"] is None and not group["differentiable"]
    fits = is_open and all(
        each.device.type == "cpu"
        and each.is_floating_point()
        and each.is_contiguous()
        and not each.is_neg()
        and each.dtype == param.dtype
        for param, *others in tensors
        for each in (param, *others)
    )
    return True if fits else fused


def _state_of(param: torch.Tensor, state: State) -> dict[str, Any]:
    if not state[param]:
        state[param].update(
            step=torch.tensor(0.0, dtype=torch.float32),
            exp_avg=torch.zeros_like(param),
            exp_avg_sq=torch.zeros_like(param),
        )
    return state[param]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
