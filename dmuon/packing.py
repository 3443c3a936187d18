"""What travels together along a row: the matrices of one owner, or a whole block; pure arithmetic.

By *owner*, each parcel of a block is broadcast, and its gradients reduced, one after the other. By
*block*, all of them are gathered, and their gradients scattered, at once: a buffer has a *slot* for
every rank of the row, each as long as the longest, so what the others hold less is padding.

What that takes on ``n`` ranks, for ``k`` parcels of ``P`` bytes and slots of ``p``, where a message
begins with ``alpha`` seconds and goes on at ``beta`` bytes a second (Hockney 1994, "The
Communication Challenge for MPP"):

- by owner ``k log2(n) alpha + P / beta``: a broadcast or reduction is a pipeline, in which every
  link carries all of it;
- by block ``(n - 1) (alpha + p / beta)``: a ring, of which every link carries all but one slot.

Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH",
has both; NCCL's tests reckon bandwidths the same way (doc/PERFORMANCE.md there). A ring is the way
of gathering that waits longest for messages, so what it wins it wins in any case.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from dmuon.errors import SetupError

Packing = Literal["auto", "owner", "block"]


@dataclass(frozen=True)
class Link:
    """What joins the ranks of a row.

    Attributes:
        latency: seconds that one message takes to begin with.
        rate: bytes a second and rank.
    """

    latency: float
    rate: float


# With gloo a block never wins: measured on 2 and 4 ranks of one machine, from 256 bytes to 4 MiB an
# owner, broadcasts took 0.3 to 1.0 of the time of an all-gather, and all-to-all with a sum 0.3 to
# 0.6 of that of a reduce-scatter. NCCL's numbers are of data sheets, not measured: eight adapters
# of 25 GB/s for the eight GPUs of a machine (DGX A100). Faster links favour the block more.
LINKS = {"nccl": Link(latency=5e-6, rate=200e9)}

CLEARLY = 0.8  # a block has to take less than this part of the time, for the model is coarse
MOST_PADDING = 1.25  # slots over what is in them: they take memory while a block is whole
_ALIGNED = 8  # elements: slots begin at 16 bytes, also in 16 bits, as NCCL likes it


class Slots:
    """Where the parcels of a block lie in one buffer.

    Attributes:
        length: of a slot, in elements.
        numel: of the buffer.
        spans: begin and end of each parcel in the buffer.
        padding: begin and end of what is left of each slot, where there is any.
    """

    def __init__(self, parcels: Iterable[tuple[int, int]], num_ranks: int) -> None:
        """Lay out ``parcels``, each given by its rank in the row and its number of elements."""
        ends = [0] * num_ranks
        places = []
        for rank, numel in parcels:
            places.append((rank, ends[rank], ends[rank] + numel))
            ends[rank] += numel
        self.length = -(-max(ends) // _ALIGNED) * _ALIGNED
        self.numel = num_ranks * self.length
        self.spans = [
            (rank * self.length + begin, rank * self.length + end) for rank, begin, end in places
        ]
        self.padding = [
            (rank * self.length + end, (rank + 1) * self.length)
            for rank, end in enumerate(ends)
            if end < self.length
        ]

    def fills_its_slot(self, numel: int) -> bool:
        """Whether that many elements are a whole slot, but for its alignment."""
        return numel > self.length - _ALIGNED


def check_packing(packing: object) -> None:
    """Refuse anything but a `Packing`.

    Raises:
        SetupError: naming what there is.
    """
    if packing not in get_args(Packing):
        raise SetupError(f"packing is one of {', '.join(get_args(Packing))}; got {packing!r}")


def goes_by_block(
    asked: Packing,
    backend: str,
    parcels: Sequence[tuple[int, int]],
    num_ranks: int,
    itemsizes: tuple[int, int],
) -> bool:
    """Whether the parcels of a block travel together; equal on all ranks, for equal arguments.

    Args:
        asked: "owner" and "block" are done, "auto" compares what they take.
        backend: of the process group; "auto" knows those of `LINKS` and takes owners elsewhere.
        parcels: the rank in the row that each is sent by, and its elements.
        num_ranks: of the row.
        itemsizes: bytes of an element of a weight and of a gradient on their way.
    """
    if num_ranks == 1 or not parcels or asked == "owner":
        return False
    return asked == "block" or (
        backend in LINKS and _is_worth_it(LINKS[backend], parcels, num_ranks, itemsizes)
    )


def is_too_uneven(longest: int, numel: int, num_ranks: int) -> bool:
    """Whether a slot of ``longest`` elements on every rank would be mostly padding.

    Args:
        longest: of any part of a block: a matrix, a parcel, what a rank has.
        numel: of the block.
        num_ranks: of the row.
    """
    return longest * num_ranks > MOST_PADDING * numel


def _is_worth_it(
    link: Link, parcels: Sequence[tuple[int, int]], num_ranks: int, itemsizes: tuple[int, int]
) -> bool:
    numel = sum(numel for _, numel in parcels)
    length = Slots(parcels, num_ranks).length
    if is_too_uneven(length, numel, num_ranks):
        return False
    by_owner = by_block = 0.0
    for itemsize in itemsizes:
        by_owner += owner_seconds(len(parcels), numel * itemsize, num_ranks, link)
        by_block += block_seconds(length * itemsize, num_ranks, link)
    return by_block < CLEARLY * by_owner


def owner_seconds(num_parcels: int, num_bytes: int, num_ranks: int, link: Link) -> float:
    """What broadcasts or reductions of so many parcels, of so many bytes in all, take."""
    return num_parcels * math.log2(num_ranks) * link.latency + num_bytes / link.rate


def block_seconds(slot_bytes: int, num_ranks: int, link: Link) -> float:
    """What gathering or scattering slots of so many bytes takes."""
    return (num_ranks - 1) * (link.latency + slot_bytes / link.rate)
