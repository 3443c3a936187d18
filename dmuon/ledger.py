"""The one place that knows which gradients are on their way, reduced and accumulated."""

import torch

from dmuon.counters import Counters
from dmuon.parameter import DedicatedParam
from dmuon.parcel import Parcel
from dmuon.reduction import Reduced, Reduction, StartReduction


class GradientLedger:
    """Gradients of dedicated parameters, from the end of autograd to ``zero_grad``.

    Args:
        num_ranks: gradients are the mean over this many ranks.
        num_stages: legs of a reduction: 1 on a 1D mesh, 2 on a grid.
        start: how a leg is reduced.
    """

    def __init__(self, num_ranks: int, num_stages: int, start: StartReduction) -> None:
        self._num_ranks = num_ranks
        self._num_stages = num_stages
        self._start = start
        self._pending: list[tuple[int, Reduction]] = []
        self._grads: dict[DedicatedParam, torch.Tensor] = {}

    def add(self, reduction: Reduction, counters: Counters) -> None:
        """Note a reduction that has begun, and collect those that are over already.

        Those before it are taken in order and only while none of them would wait, so that memory
        is given back early and no rank waits for another inside backward.
        """
        self._pending.append((0, reduction))
        while self._num_stages == 1 and len(self._pending) > 1 and self._pending[0][1].is_done():
            self._settle_first(counters)

    def settle(self, counters: Counters) -> None:
        """Wait for everything pending and add it up. Collective on a grid (second leg)."""
        while self._pending:
            self._settle_first(counters)

    def drop(self, counters: Counters) -> None:
        """Forget all gradients, also those still on their way. Collective as ``settle`` is."""
        self.settle(counters)
        self._grads.clear()

    def grad(self, param: DedicatedParam) -> torch.Tensor | None:
        """The accumulated float32 gradient on the owner of ``param``; None: there was none."""
        return self._grads.get(param)

    def grads(self) -> list[torch.Tensor]:
        """All gradients this rank owns."""
        return list(self._grads.values())

    def _settle_first(self, counters: Counters) -> None:
        stage, reduction = self._pending.pop(0)
        reduced = reduction.finish()
        if stage + 1 < self._num_stages:
            if reduced:
                self._pending.append((stage + 1, self._start(reduced, stage + 1, counters)))
            return
        self._collect(reduced)

    def _collect(self, reduced: Reduced) -> None:
        for parcel, flat in reduced:
            if parcel.route.is_owner:
                self._collect_parcel(parcel, flat)

    def _collect_parcel(self, parcel: Parcel, flat: torch.Tensor) -> None:
        total = flat[: parcel.numel].float().div_(self._num_ranks)
        flags = flat[parcel.numel :]
        present = [True] * len(parcel.params)
        if any(param not in self._grads for param in parcel.params):
            present = (flags > 0).tolist()
        for param, view, is_there in zip(parcel.params, parcel.views(total), present, strict=True):
            if not is_there or not param.param.requires_grad:
                continue
            if param in self._grads:
                self._grads[param].add_(view)
            else:
                self._grads[param] = view
