"""The one place that knows which gradients are on their way, reduced and accumulated."""

from collections.abc import Collection

import torch
from torch.profiler import record_function

from dmuon.call_order import CallOrder
from dmuon.counters import Counters
from dmuon.parameter import DedicatedParam
from dmuon.parcel import Parcel
from dmuon.reduction import Reduction, StartReduction


class GradientLedger:
    """Gradients of dedicated parameters, from the end of autograd to ``zero_grad``.

    Args:
        num_ranks: gradients are the mean over this many ranks.
        num_stages: legs of a reduction: 1 on a 1D mesh, 2 on a grid.
        start: how a leg is reduced.
        order: explains a collective that fails.
        counters: where collectives are counted.
    """

    def __init__(
        self,
        num_ranks: int,
        num_stages: int,
        start: StartReduction,
        order: CallOrder,
        counters: Counters,
    ) -> None:
        self._num_ranks = num_ranks
        self._num_stages = num_stages
        self._start = start
        self._order = order
        self._counters = counters
        self._pending: list[tuple[int, Reduction, str]] = []
        self._grads: dict[DedicatedParam, torch.Tensor] = {}
        self._had_gradient_here: set[DedicatedParam] = set()

    def add(
        self, reduction: Reduction, had_gradient_here: Collection[DedicatedParam], what: str
    ) -> None:
        """Note a reduction that has begun, and collect those that are over already.

        Those before it are taken in order and only while none of them would wait, so that memory
        is given back early and no rank waits for another inside backward.

        Args:
            reduction: of one block.
            had_gradient_here: parameters of the block that have a gradient on this rank.
            what: the block, for messages and profiles.
        """
        self._had_gradient_here.update(had_gradient_here)
        self._pending.append((0, reduction, what))
        while self._num_stages == 1 and len(self._pending) > 1 and self._pending[0][1].is_done():
            self._settle_first()

    def settle(self) -> None:
        """Wait for everything pending and add it up. Collective on a grid (second leg)."""
        while self._pending:
            self._settle_first()

    def drop(self) -> None:
        """Forget all gradients, also those still on their way. Collective as ``settle`` is."""
        self.settle()
        self._grads.clear()
        self._had_gradient_here.clear()

    def discard(self, params: Collection[DedicatedParam]) -> None:
        """Forget the gradients of ``params``. Collective as ``settle`` is."""
        self.settle()
        for param in params:
            self._grads.pop(param, None)
            self._had_gradient_here.discard(param)

    def grad(self, param: DedicatedParam) -> torch.Tensor | None:
        """The accumulated float32 gradient on the owner of ``param``; None: there was none."""
        return self._grads.get(param)

    def named_grads(self) -> dict[str, torch.Tensor]:
        """All gradients this rank owns, by the names of their parameters."""
        return {param.name: grad for param, grad in self._grads.items()}

    def _settle_first(self) -> None:
        stage, reduction, what = self._pending.pop(0)
        with (
            record_function(f"dmuon::wait_reduce {what}"),
            self._order.explained(f"bringing the gradients of {what} to their owners"),
        ):
            reduced = reduction.finish()
            if stage + 1 < self._num_stages:
                if reduced:
                    following = self._start(reduced, stage + 1, self._counters)
                    self._pending.append((stage + 1, following, what))
                return
        for parcel, flat in reduced:
            if parcel.route.is_owner:
                self._collect(parcel, flat)

    def _collect(self, parcel: Parcel, flat: torch.Tensor) -> None:
        total = flat[: parcel.numel].float()
        if self._num_ranks > 1:  # alone, it would be a pass over everything for nothing
            total.div_(self._num_ranks)
        known = self._grads.keys() | self._had_gradient_here
        present = [True] * len(parcel.params)
        if any(param not in known for param in parcel.params):
            # the flags tell; they are read only here, because that waits for the device
            present = (flat[parcel.numel :] > 0).tolist()
        for param, view, is_there in zip(parcel.params, parcel.views(total), present, strict=True):
            if not is_there:
                continue
            if param in self._grads:
                self._grads[param].add_(view)
            else:
                self._grads[param] = view
