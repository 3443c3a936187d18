"""Bringing the gradients of one block to their owners; which collective is a choice.

Parcel by parcel the backend decides; a block as a whole is scattered (`dmuon.packing`).

What travels for one parcel is its gradients back to back, then one flag a parameter: 1 where this
rank has a gradient, 0 where it sends zeros. So owners learn, without another collective, that a
parameter had no gradient anywhere.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from dmuon import torch_internals
from dmuon.counters import Counters
from dmuon.packing import Slots
from dmuon.parameter import DedicatedParam
from dmuon.parcel import MASTER_DTYPE, Parcel

Reduced = list[tuple[Parcel, torch.Tensor]]  # on the owner: flat sums, with flags at the end


class Reduction(Protocol):
    """The reduction of one block's gradients along one leg of their routes, under way."""

    def finish(self) -> Reduced:
        """Wait; what this rank is the root of, summed over the leg's ranks."""

    def is_done(self) -> bool:
        """Whether ``finish`` would not wait."""


class StartReduction(Protocol):
    """Begins a reduction along one leg: of what this rank sends, the leg's number, who counts."""

    @property
    def takes_one_buffer(self) -> bool:
        """Whether what lies back to back, in the order of the roots, is sent as it lies."""

    def __call__(self, sent: Reduced, stage: int, counters: Counters) -> Reduction:
        """Begin it. Collective over the leg; asynchronous."""


class RootedReduction:
    """One packed ``reduce`` a parcel: what NCCL does well."""

    takes_one_buffer = False

    def __init__(self, sent: Reduced, stage: int, counters: Counters) -> None:
        self._sent = sent
        self._stage = stage
        self._works: list[dist.Work] = []
        for parcel, flat in sent:
            leg = parcel.route.reduce[stage]
            if leg.size > 1:
                counters.count("reduce", flat.nbytes)
                work = dist.reduce(flat, group=leg.group, group_dst=leg.root, async_op=True)
                assert work is not None
                self._works.append(work)

    def finish(self) -> Reduced:
        """Wait; other ranks' buffers hold garbage now and are dropped."""
        for work in self._works:
            work.wait()
        sent, self._sent = self._sent, []
        return [(p, flat) for p, flat in sent if p.route.reduce[self._stage].is_root]

    def is_done(self) -> bool:
        """Whether ``finish`` would not wait."""
        return all(work.is_completed() for work in self._works)


class ExchangedReduction:
    """One packed all-to-all, then a sum on the owner in the order of the ranks.

    On gloo this moves ``N - 1`` sizes over all ranks where ``reduce`` moves about ``4.26/3`` of
    that at four ranks, and the fixed order of the sum makes it deterministic.
    """

    takes_one_buffer = True

    def __init__(self, sent: Reduced, stage: int, counters: Counters) -> None:
        self._sent = sent
        self._stage = stage
        self._work: dist.Work | None = None
        self._leg = sent[0][0].route.reduce[stage]
        if self._leg.size > 1:
            self._exchange(counters)

    def _exchange(self, counters: Counters) -> None:
        num_ranks = self._leg.size
        by_root: list[list[torch.Tensor]] = [[] for _ in range(num_ranks)]
        for parcel, flat in self._sent:
            by_root[parcel.route.reduce[self._stage].root].append(flat)
        sizes = [sum(flat.numel() for flat in flats) for flats in by_root]
        sent = _joined([flat for flats in by_root for flat in flats])
        mine = sizes[self._leg.group.rank()]
        self._received = sent.new_empty(num_ranks * mine)
        counters.count("all_to_all", sent.nbytes)
        self._packed = sent  # kept until the exchange is over
        self._work = dist.all_to_all_single(
            self._received, sent, [mine] * num_ranks, sizes, group=self._leg.group, async_op=True
        )
        stage = self._stage
        self._sent = [(p, flat) for p, flat in self._sent if p.route.reduce[stage].is_root]

    def finish(self) -> Reduced:
        """Wait, and add up what the ranks sent, in their order."""
        sent, self._sent = self._sent, []
        if self._work is None:
            return sent
        self._work.wait()
        if not sent:
            return []
        pieces = self._received.view(self._leg.size, -1)
        total = pieces[0].to(MASTER_DTYPE, copy=True)
        for piece in pieces[1:]:
            total += piece
        sums = total.split([flat.numel() for _, flat in sent])
        return [(parcel, piece) for (parcel, _), piece in zip(sent, sums, strict=True)]

    def is_done(self) -> bool:
        """Whether ``finish`` would not wait."""
        return self._work is None or self._work.is_completed()


class ScatteredReduction:
    """One ``reduce_scatter`` of a whole block, along the row alone."""

    def __init__(
        self, parcels: Sequence[Parcel], slots: Slots, packed: torch.Tensor, counters: Counters
    ) -> None:
        leg = parcels[0].route.reduce[0]
        begin_of_mine = leg.group.rank() * slots.length
        self._mine = [
            (parcel, begin - begin_of_mine, end - begin_of_mine)
            for parcel, (begin, end) in zip(parcels, slots.spans, strict=True)
            if parcel.route.reduce[0].is_root
        ]
        self._slots = slots
        self._total = packed.new_empty(slots.length)
        counters.count("reduce_scatter", packed.nbytes)
        self._packed = packed  # kept until it is over
        self._work = torch_internals.reduce_scatter(
            self._total, packed, group=leg.group, async_op=True
        )

    def finish(self) -> Reduced:
        """Wait; sums that are views would keep all of the slot, so smaller ones are copies."""
        self._work.wait()
        total = self._total
        del self._packed, self._total
        flats = [(parcel, total[begin:end]) for parcel, begin, end in self._mine]
        if all(self._slots.fills_its_slot(flat.numel()) for _, flat in flats):
            return flats
        return [(parcel, flat.clone()) for parcel, flat in flats]

    def is_done(self) -> bool:
        """Whether ``finish`` would not wait."""
        return self._work.is_completed()


def choose_reduction(group: dist.ProcessGroup) -> StartReduction:
    """The reduction that suits the backend of ``group``."""
    return ExchangedReduction if dist.get_backend(group) == "gloo" else RootedReduction


def _joined(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat tensor of all; where they lie back to back already, without a copy."""
    first, storage = flats[0], flats[0].untyped_storage().data_ptr()
    end = begin = first.storage_offset()
    for flat in flats:
        if (flat.untyped_storage().data_ptr(), flat.storage_offset()) != (storage, end):
            return torch.cat(list(flats))
        end += flat.numel()
    return first.as_strided((end - begin,), (1,))


def pack(parcels: Reduced) -> list[DedicatedParam]:
    """Take the local gradients into flat buffers, zeros for what is missing, each parcel's flags.

    Args:
        parcels: each with its buffer, ``numel_with_flags`` long.

    Returns:
        The parameters that have a gradient on this rank.
    """
    present: list[DedicatedParam] = []
    views: list[torch.Tensor] = []
    grads: list[torch.Tensor] = []
    for parcel, flat in parcels:
        flags = flat[parcel.numel :]
        flags.fill_(1.0)
        for index, (param, view) in enumerate(zip(parcel.params, parcel.views(flat), strict=True)):
            grad = param.take_gradient()
            if grad is None:
                view.zero_()
                flags[index] = 0.0
            else:
                present.append(param)
                views.append(view)
                grads.append(grad)
    if views:
        torch._foreach_copy_(views, grads)  # one launch
    return present
