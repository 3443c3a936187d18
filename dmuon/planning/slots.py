"""Which blocks travel whole, and in what slots: what `dmuon.carriers` will do."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dmuon.packing import LINKS, Slots, goes_by_block, is_too_uneven
from dmuon.planning.conduct import Conduct
from dmuon.planning.shape import BlockShape


@dataclass(frozen=True)
class BlockSlots:
    """Of one block.

    Attributes:
        weights: of its matrices.
        gradients: of these, with their flags.
    """

    weights: Slots
    gradients: Slots


def slots_of(block: BlockShape, owners: Sequence[int], conduct: Conduct) -> BlockSlots | None:
    """The slots of a block whose matrices have these owners; None where it travels by owner."""
    S, backend = conduct.mesh.num_shards, conduct.backend
    if conduct.packing == "auto" and (
        backend not in LINKS or is_too_uneven(block.longest_matrix, block.dedicated_numel, S)
    ):
        return None  # nearly always, and told without adding up what each owner has
    numel, flags = Counter[int](), Counter[int]()
    for matrix, owner in zip(block.matrices, owners, strict=True):
        numel[owner] += matrix.numel
        flags[owner] += 1
    parcels = [(owner % S, numel[owner]) for owner in numel]
    itemsizes = (conduct.weight_itemsize, conduct.reduce_itemsize)
    if not goes_by_block(conduct.packing, backend, parcels, S, itemsizes):
        return None
    with_flags = [(owner % S, numel[owner] + flags[owner]) for owner in numel]
    return BlockSlots(Slots(parcels, S), Slots(with_flags, S))
