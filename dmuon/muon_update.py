"""The method itself, in a few short functions; each matrix of a parameter is updated alone.

Letters: ``B x m x n`` the matrices of one part of a parameter, see `dmuon.layout`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from dmuon.batching import Workspace, orthogonalize_all
from dmuon.layout import Layout
from dmuon.newton_schulz import coefficient_schedule, default_dtype
from dmuon.update_statistics import ParamWatch

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
        watch: what looks at its update; None: nobody.
    """

    weight: torch.Tensor
    grad: torch.Tensor
    momentum_buffer: torch.Tensor
    layout: Layout
    watch: ParamWatch | None = None


def update_(params: Sequence[Due], group: Mapping[str, Any], workspace: Workspace) -> int:
    """One Muon step of ``params``, in place on weights and momentum.

    Beside these, memory for one batch of matrices is needed.

    Args:
        params: of one parameter group; what is computed for one does not depend on the others.
        group: the settings of the group.
        workspace: on the device of the parameters.

    Returns:
        How many matrices were orthogonalised.
    """
    lr = float(group["lr"])
    kept = 1 - lr * group["weight_decay"]
    parts = [
        _Part(
            weights=weights,
            grads=grads,
            buffers=buffers,
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            kept=kept,
            rate=lr * lr_scale(weights.shape, group["adjust_lr_fn"]),
            watch=due.watch,
            number=number,
        )
        for due in params
        for number, (weights, grads, buffers) in enumerate(
            zip(*map(due.layout.views, (due.weight, due.grad, due.momentum_buffer)), strict=True)
        )
    ]
    orthogonalize_all(
        parts,
        workspace,
        coefficient_schedule(group["ns_coefficients"], group["ns_steps"]),
        dtype=group["ns_dtype"] or default_dtype(workspace.device),
        eps=group["eps"],
    )
    return sum(len(part.weights) for part in parts)


@dataclass(frozen=True)
class _Part:
    """One part of a parameter; each of its tensors is read once and written at most once.

    Attributes:
        weights: the master weights, ``(B, m, n)`` as the next two.
        grads: the mean gradients.
        buffers: the momentum of the last step.
        momentum: how much of it is kept.
        nesterov: whether to look one step ahead.
        kept: factor on the weights.
        rate: how much of the orthogonal matrices is subtracted.
        watch: what looks at the update; None: nobody.
        number: of this part in its parameter.
        first: number of its first matrix, where the part was divided.
    """

    weights: torch.Tensor
    grads: torch.Tensor
    buffers: torch.Tensor
    momentum: float
    nesterov: bool
    kept: float
    rate: float
    watch: ParamWatch | None
    number: int
    first: int = 0

    @property
    def shape(self) -> torch.Size:
        return self.weights.shape

    def split_at(self, count: int) -> tuple["_Part", "_Part"]:
        first, second = (
            replace(
                self,
                weights=self.weights[some],
                grads=self.grads[some],
                buffers=self.buffers[some],
                first=self.first + (some.start or 0),
            )
            for some in (slice(count), slice(count, None))
        )
        return first, second

    def write_to(self, room_BMN: torch.Tensor) -> None:
        """Advance the momentum; put there what is to be orthogonalised."""
        grad, buffer, momentum = self.grads, self.buffers, self.momentum
        torch.add(grad, buffer, alpha=momentum, out=buffer)
        if self.nesterov:
            torch.add(grad, buffer, alpha=momentum, out=room_BMN)
        else:
            room_BMN.copy_(buffer)

    def take(self, orthogonal_BMN: torch.Tensor) -> None:
        """Update the weights."""
        if self.watch is not None:
            self.watch.see(self.number, self.first, self.weights, orthogonal_BMN, self.rate)
        if self.kept != 1:
            self.weights.mul_(self.kept)
        self.weights.add_(orthogonal_BMN, alpha=-self.rate)
