"""How the weights and gradients of one block travel along a row: by owner, or by block.

See `dmuon.packing` for what that means and which is chosen. What follows on a grid, along the
columns, is the same for both.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from dmuon import torch_internals
from dmuon.counters import Counters
from dmuon.packing import Packing, Slots, goes_by_block
from dmuon.parameter import DedicatedParam
from dmuon.parcel import Parcel
from dmuon.reduction import Reduced, Reduction, ScatteredReduction, StartReduction, pack


class Carrier(Protocol):
    """What brings one block from its owners to every rank of the row, and its gradients back."""

    @property
    def packing(self) -> str:
        """What travels together: "owner" or "block"."""

    def start_unshard(self, counters: Counters) -> None:
        """Begin to make the weights whole here. Collective over the row; asynchronous."""

    def finish_unshard(self) -> None:
        """Wait for what ``start_unshard`` began, then show the weights."""

    def reshard(self) -> None:
        """Free what belongs to others; autograd's views of it are filled again by an unshard."""

    def start_reduction(
        self, dtype: torch.dtype, counters: Counters
    ) -> tuple[Reduction, Collection[DedicatedParam]]:
        """Take the local gradients and begin to bring them to their sources.

        Collective over the row; asynchronous.

        Returns:
            The reduction, and the parameters that have a gradient on this rank.
        """


class OwnerCarrier:
    """Each parcel by itself: a broadcast, and the reduction that suits the backend."""

    packing = "owner"

    def __init__(self, parcels: Sequence[Parcel], start: StartReduction) -> None:
        self._parcels = list(parcels)
        self._start = start

    def start_unshard(self, counters: Counters) -> None:
        """Begin to make the weights whole here. Collective over the row; asynchronous."""
        for parcel in self._parcels:
            parcel.start_unshard(counters)

    def finish_unshard(self) -> None:
        """Wait for what ``start_unshard`` began, then show the weights."""
        for parcel in self._parcels:
            parcel.finish_unshard()

    def reshard(self) -> None:
        """Free what belongs to others; autograd's views of it are filled again by an unshard."""
        for parcel in self._parcels:
            parcel.reshard()

    def start_reduction(
        self, dtype: torch.dtype, counters: Counters
    ) -> tuple[Reduction, Collection[DedicatedParam]]:
        """Take the local gradients and begin to bring them to their sources.

        Collective over the row; asynchronous.

        Returns:
            The reduction, and the parameters that have a gradient on this rank.
        """
        if self._start.takes_one_buffer:
            sent = self._back_to_back(dtype)
            had_gradient = pack(sent)
        else:  # one after the other, so that gradients are freed early
            sent, had_gradient = [], []
            for parcel in self._parcels:
                flat = torch.empty(parcel.numel_with_flags, dtype=dtype, device=parcel.device)
                had_gradient += pack([(parcel, flat)])
                sent.append((parcel, flat))
        return self._start(sent, 0, counters), had_gradient

    def _back_to_back(self, dtype: torch.dtype) -> Reduced:
        """Room for the gradients of all parcels, in the order of their roots on each leg."""
        parcels = sorted(self._parcels, key=lambda p: [leg.root for leg in p.route.reduce])
        sizes = [parcel.numel_with_flags for parcel in parcels]
        buffer = torch.empty(sum(sizes), dtype=dtype, device=parcels[0].device)
        return list(zip(parcels, buffer.split(sizes), strict=True))


class BlockCarrier:
    """All parcels of a block, of one dtype, in one buffer: an all-gather and a reduce-scatter.

    Sources go on showing the copy that they keep; their part of the buffer is sent and dropped.
    """

    packing = "block"

    def __init__(self, parcels: Sequence[Parcel]) -> None:
        self._parcels = list(parcels)
        first = self._parcels[0]
        self._device = first.device
        self._group = first.route.unshard.group
        self._weights = self._slots([parcel.numel for parcel in parcels])
        self._grads = self._slots([parcel.numel_with_flags for parcel in parcels])
        self._buffer = torch.empty(self._weights.numel, dtype=first.dtype, device=self._device)
        self._mine = self._buffer.chunk(self._group.size())[self._group.rank()]
        self._sent: list[tuple[Parcel, torch.Tensor]] = []
        for parcel, (begin, end) in zip(parcels, self._weights.spans, strict=True):
            if parcel.route.unshard.is_root:
                self._sent.append((parcel, self._buffer[begin:end]))
            else:
                parcel.arrive_in(self._buffer[begin:end])
        self._free()
        self._arriving: dist.Work | None = None

    def start_unshard(self, counters: Counters) -> None:
        """Begin to make the weights whole here. Collective over the row; asynchronous."""
        storage = self._buffer.untyped_storage()
        storage.resize_(self._buffer.nbytes)
        if self._sent:
            views = [view for _, view in self._sent]
            torch._foreach_copy_(views, [parcel.source_wire() for parcel, _ in self._sent])
        counters.count("all_gather", self._buffer.nbytes)
        self._arriving = torch_internals.all_gather(
            self._buffer, self._mine, group=self._group, async_op=True
        )

    def finish_unshard(self) -> None:
        """Wait for what ``start_unshard`` began, then show the weights."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        for parcel in self._parcels:
            parcel.finish_unshard()

    def reshard(self) -> None:
        """Free the buffer; autograd's views of it are filled again by an unshard."""
        self._free()
        for parcel in self._parcels:
            parcel.hide()

    def start_reduction(
        self, dtype: torch.dtype, counters: Counters
    ) -> tuple[Reduction, Collection[DedicatedParam]]:
        """Take the local gradients and begin to bring them to their sources.

        Collective over the row; asynchronous.

        Returns:
            The reduction, and the parameters that have a gradient on this rank.
        """
        packed = torch.empty(self._grads.numel, dtype=dtype, device=self._device)
        if self._grads.padding:  # is added up too, and must be no NaN for those who look for them
            torch._foreach_zero_([packed[begin:end] for begin, end in self._grads.padding])
        flats = [packed[begin:end] for begin, end in self._grads.spans]
        had_gradient = pack(list(zip(self._parcels, flats, strict=True)))
        return ScatteredReduction(self._parcels, self._grads, packed, counters), had_gradient

    def _slots(self, numels: Sequence[int]) -> Slots:
        roots = (parcel.route.unshard.root for parcel in self._parcels)
        return Slots(zip(roots, numels, strict=True), self._group.size())

    def _free(self) -> None:
        self._buffer.untyped_storage().resize_(0)


def choose_carrier(
    parcels: Sequence[Parcel],
    packing: Packing,
    reduce_dtype: torch.dtype | None,
    start: StartReduction,
) -> Carrier:
    """The carrier of a block. Local.

    It is the same on all ranks: all that it depends on was compared by ``dedicate_params``.

    Args:
        parcels: of the block.
        packing: as asked for.
        reduce_dtype: in which gradients travel; None: that of the weights on the wire.
        start: how a parcel is reduced by itself.
    """
    first = parcels[0]
    group = first.route.unshard.group
    by_block = all(parcel.dtype == first.dtype for parcel in parcels) and goes_by_block(
        packing,
        torch_internals.backend_of(group, first.device),
        [(parcel.route.unshard.root, parcel.numel) for parcel in parcels],
        group.size(),
        (first.dtype.itemsize, (reduce_dtype or first.dtype).itemsize),
    )
    return BlockCarrier(parcels) if by_block else OwnerCarrier(parcels, start)
