"""Whole weights and gradients that a rank holds for a while, at their peak.

The moments of a step in the order of `dmuon.engine` and of FSDP2, and what is there in each:
weights of the block at hand and of the one that is sent for ahead, gradients from autograd until
they are packed, and what is packed until it has been reduced. A reduction is taken to be over when
it is asked for, which a rank does only after the next block; on a grid both legs of a reduction
last while those of the blocks after it begin, as many as `dmuon.ledger` lets be under way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dmuon.ledger import MOST_UNDER_WAY
from dmuon.packing import Slots
from dmuon.partition import Plan
from dmuon.planning.conduct import Conduct
from dmuon.planning.shape import BlockShape, ModelShape
from dmuon.planning.slots import slots_of

FLOAT32 = 4


@dataclass(frozen=True)
class _Held:
    """Bytes of one block on a rank.

    Attributes:
        arrived: weights of its matrices that others keep; all of them, with the padding, where it
            travels whole.
        gathered: weights of its symmetric parameters, on all shards.
        computed: gradients of these from autograd; ``computed_early`` of all but embeddings.
        scattering: the same on their way, padded.
        accumulated: gradients of all its parameters that wait for the last micro-batch.
        pending: packed gradients of its matrices until their reduction is asked for.
        sending: the same while it begins.
        summed: what is added up when its first leg is over.
        exchanging: what the second leg of the reduction takes while it begins.
        settling: what it takes until it is asked for.
    """

    arrived: int
    gathered: int
    computed: int
    computed_early: int
    scattering: int
    accumulated: int
    pending: int
    sending: int
    summed: int
    exchanging: int
    settling: int


def peak_of_unsharded(shape: ModelShape, plan: Plan, conduct: Conduct, rank: int) -> int:
    """Bytes on a rank."""
    owners = iter(plan.owners)
    held = []
    for block in shape.blocks:
        owned = [(next(owners), matrix.numel) for matrix in block.matrices]
        held.append(_held(block, owned, conduct, rank))
    has_root = bool(shape.blocks) and shape.blocks[0].name == ""
    last = shape.last_with_matrices if conduct.reshard_after_forward else None
    kept = [block.arrived if index == last else 0 for index, block in enumerate(held)]
    moments = (*_forward(held, kept, conduct, has_root), *_backward(held, kept, conduct, has_root))
    return max(moments, default=0)


def _held(
    block: BlockShape, owned: Sequence[tuple[int, int]], conduct: Conduct, rank: int
) -> _Held:
    mesh, weight, grad = conduct.mesh, conduct.weight_itemsize, conduct.reduce_itemsize
    S, R, is_exchange = mesh.num_shards, mesh.num_replicas, conduct.transport == "all_to_all"
    mine = [numel for owner, numel in owned if owner % S == rank % S]
    final = [numel for owner, numel in owned if owner == rank]
    slots = slots_of(block, [owner for owner, _ in owned], conduct)
    # a flag travels with each gradient
    flats = grad * (block.dedicated_numel + len(owned))
    my_flats, final_flats = (grad * (sum(some) + len(some)) for some in (mine, final))
    # reduced in place, in float32 what the owner packs becomes its gradient
    stays = rank if not is_exchange and grad == FLOAT32 else None
    pending = flats - (0 if stays is None else final_flats)
    if slots is not None:
        pending, sending = _scattering(slots.gradients, block, conduct, sum(final) + len(final))
    elif is_exchange:
        arriving = S * my_flats if S > 1 else 0
        sending = flats + max(weight * block.dedicated_numel, arriving)
        pending = flats + arriving
    else:
        sending = _packing(owned, conduct, stays)
    summed, exchanging, settling = 0, 0, my_flats - (0 if stays is None else final_flats)
    if is_exchange and R > 1:
        summed = my_flats if S > 1 and slots is None else 0
        exchanging = my_flats * (1 if slots is None else 2) + R * final_flats
        settling = exchanging - my_flats + (final_flats if slots or not final else my_flats)
    symmetric = block.symmetric_numel
    numel = block.dedicated_numel + symmetric
    padded = block.padded(S)
    foreign = block.dedicated_numel - sum(mine)
    return _Held(
        arrived=weight * (foreign if slots is None else slots.weights.numel),
        gathered=weight * padded,
        computed=weight * symmetric,
        computed_early=weight * (symmetric - block.looked_up_numel),
        scattering=grad * padded,
        accumulated=max(weight, grad) * numel if conduct.num_micro_batches > 1 else 0,
        pending=pending,
        sending=sending,
        summed=summed,
        exchanging=exchanging,
        settling=settling,
    )


def _scattering(
    slots: Slots, block: BlockShape, conduct: Conduct, num_final: int
) -> tuple[int, int]:
    """Packed gradients of a block that travels whole.

    Args:
        slots: of them.
        block: which.
        conduct: of the training.
        num_final: elements of what the rank owns, and their flags.

    Returns:
        Bytes until the reduction is asked for, and the most while it begins.
    """
    grad, is_rooted = conduct.reduce_itemsize, conduct.transport == "reduce"
    packed, slot = grad * slots.numel, grad * slots.length
    # what is added up in float32 becomes the gradient, unless it is copied out of the slot
    stays = grad == FLOAT32 and (is_rooted or conduct.mesh.num_replicas == 1)
    stays = stays and num_final > 0 and slots.fills_its_slot(num_final)
    begun = packed + conduct.weight_itemsize * block.dedicated_numel
    return packed + (0 if stays else slot), max(begun, packed + slot)


def _packing(owned: Sequence[tuple[int, int]], conduct: Conduct, stays: int | None) -> int:
    """The most bytes of gradients from autograd and packed ones while parcels are packed in turn.

    Args:
        owned: owner and elements of each matrix of the block.
        conduct: of the training.
        stays: the owner whose packed gradients are counted as gradients.
    """
    parcels: dict[tuple[str, int], tuple[int, int]] = {}
    for owner, numel in owned:
        elements, flags = parcels.get((str(owner), owner), (0, 0))
        parcels[str(owner), owner] = elements + numel, flags + 1
    computed, packed, moments = conduct.weight_itemsize * sum(n for _, n in owned), 0, [0]
    for (_, owner), (numel, flags) in sorted(parcels.items()):
        packed += 0 if owner == stays else conduct.reduce_itemsize * (numel + flags)
        moments.append(computed + packed)
        computed -= conduct.weight_itemsize * numel
    return max(moments)


def _forward(
    held: Sequence[_Held], kept: Sequence[int], conduct: Conduct, has_root: bool
) -> Iterator[int]:
    """Making the root whole, which takes its weights twice, then block after block.

    Args:
        held: of each block.
        kept: weights of each that stay for the backward although others are freed.
        conduct: of the training.
        has_root: whether the first block is the root.
    """
    root = held[0].gathered if has_root else 0
    yield 2 * root + held[0].arrived
    whole = 0
    for block, stays, following in zip(held, kept, [*held[1:], None], strict=True):
        ahead = 0 if following is None else following.arrived + following.gathered
        yield root + whole + block.arrived + 2 * block.gathered + ahead
        whole += stays if conduct.reshard_after_forward else block.arrived + block.gathered


class _Reductions:
    """Of blocks whose gradients are packed, as `dmuon.ledger` keeps them."""

    def __init__(self, is_grid: bool) -> None:
        self._is_grid = is_grid
        self._first: list[_Held] = []
        self._second: list[_Held] = []

    @property
    def held(self) -> int:
        """Bytes of all."""
        second = sum(block.settling for block in self._second)
        return sum(block.pending for block in self._first) + second

    def add(self, block: _Held) -> int:
        """Begin that of ``block``; the most bytes until as few as may be are under way again."""
        self._first.append(block)
        return max(self._finish(MOST_UNDER_WAY if self._is_grid else 1), default=0)

    def settle(self) -> Iterator[int]:
        """Finish all; bytes on the way."""
        yield self.held
        yield from self._finish(0)

    def _finish(self, most: int) -> Iterator[int]:
        while len(self._first) > most:
            block = self._first[0]
            yield self.held + block.summed
            del self._first[0]
            yield self.held + block.exchanging
            if self._is_grid and block.settling:
                self._second.append(block)
                yield self.held
                del self._second[:-MOST_UNDER_WAY]


def _backward(
    held: Sequence[_Held], kept: Sequence[int], conduct: Conduct, has_root: bool
) -> Iterator[int]:
    """The reduction of each block, from the last to the first, then that of the root.

    Args:
        held: of each block.
        kept: as of ``_forward``.
        conduct: of the training.
        has_root: whether the first block is the root.
    """
    first = 1 if has_root else 0
    early = held[0].accumulated or held[0].computed_early if has_root else 0
    root = held[0].gathered + early if has_root else 0
    waiting = sum(block.accumulated for block in held[first:])
    reductions = _Reductions(is_grid=conduct.mesh.num_replicas > 1)
    scattering = 0
    for index in range(len(held) - 1, -1, -1):
        block, before = held[index], held[:index]
        ahead = before[-1:] if conduct.reshard_after_forward else before
        there = sum(each.arrived for each in ahead) + sum(kept[: index - len(ahead)])
        there += reductions.held + scattering
        if index >= first:
            waiting -= block.accumulated
            gathered = block.gathered + block.computed + sum(b.gathered for b in ahead[first:])
            yield root + waiting + there + gathered + block.sending
            scattering = block.scattering
        else:
            computed = max(block.computed, block.accumulated)
            yield there + block.gathered + computed + block.sending
            yield reductions.held + computed + block.scattering + block.pending
        if block.sending:
            there = root + waiting if index >= first else 0
            yield there + scattering + reductions.add(block)
    yield from reductions.settle()
