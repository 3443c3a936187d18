"""The one place that knows which gradients are on their way, reduced and accumulated."""

from collections import deque
from collections.abc import Collection

import torch
from torch.profiler import record_function

from dmuon.call_order import CallOrder
from dmuon.counters import Counters
from dmuon.parameter import DedicatedParam
from dmuon.parcel import Parcel
from dmuon.reduction import Reduction, StartReduction

MOST_UNDER_WAY = 2  # reductions of each leg that a backward on a grid leaves unfinished


class GradientLedger:
    """Gradients of dedicated parameters, from the end of autograd to ``zero_grad``.

    Args:
        num_ranks: gradients are the mean over this many ranks.
        num_legs: of a reduction: 1 on a 1D mesh, 2 on a grid.
        start: how a leg is reduced.
        order: explains a collective that fails.
        counters: where collectives are counted.
    """

    def __init__(
        self,
        num_ranks: int,
        num_legs: int,
        start: StartReduction,
        order: CallOrder,
        counters: Counters,
    ) -> None:
        self._num_ranks = num_ranks
        self._start = start
        self._order = order
        self._counters = counters
        self._pending = [deque[tuple[Reduction, str]]() for _ in range(num_legs)]
        self._grads: dict[DedicatedParam, torch.Tensor] = {}
        self._had_gradient_here: set[DedicatedParam] = set()

    def add(
        self, reduction: Reduction, had_gradient_here: Collection[DedicatedParam], what: str
    ) -> None:
        """Note a reduction that has begun, and take those before it further, to free memory early.

        With one leg those are collected that are over already, so no rank waits inside backward.
        On a grid each rank goes on by numbers alone: it waits for the oldest first leg and starts
        its second while more than `MOST_UNDER_WAY` are under way, and so with second legs.

        Nobody waits for ever. Ranks that expect the same gradients go through one list of starts
        and waits, each through the part of it that is of its own row and column. Of the
        collectives that do not end take the first in the list: all ranks come to start it, as all
        they wait for before it ends; so it ends. Where a rank expects other gradients, it starts
        some reductions only at the end of its backward, so then nobody waits before ``settle``.

        Args:
            reduction: of one block.
            had_gradient_here: parameters of the block that have a gradient on this rank.
            what: the block, for messages and profiles.
        """
        self._had_gradient_here.update(had_gradient_here)
        first = self._pending[0]
        first.append((reduction, what))
        if not self.waits_in_backward:
            while len(first) > 1 and first[0][0].is_done():
                self._finish_oldest(0)
        elif len(first) > MOST_UNDER_WAY and self._order.is_expected_by_all():
            while len(first) > MOST_UNDER_WAY:
                self._finish_oldest(0)

    @property
    def waits_in_backward(self) -> bool:
        """Whether `add` may wait for other ranks, when all expect the same gradients."""
        return len(self._pending) > 1

    def settle(self) -> None:
        """Wait for everything pending and add it up. Collective on a grid (second leg)."""
        for leg, pending in enumerate(self._pending):
            while pending:
                self._finish_oldest(leg)

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

    def _finish_oldest(self, leg: int) -> None:
        """Wait for it, then start its next leg or, after the last, add it up."""
        reduction, what = self._pending[leg].popleft()
        with (
            record_function(f"dmuon::wait_reduce {what}"),
            self._order.explained(f"bringing the gradients of {what} to their owners"),
        ):
            reduced = reduction.finish()
            del reduction  # and its buffers
            following = self._pending[leg + 1] if leg + 1 < len(self._pending) else None
            if following is not None and reduced:
                following.append((self._start(reduced, leg + 1, self._counters), what))
        if following is None:
            for parcel, flat in reduced:
                if parcel.route.is_owner:
                    self._collect(parcel, flat)
            return
        del reduced
        while len(following) > MOST_UNDER_WAY:
            self._finish_oldest(leg + 1)

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
