"""Bytes that a rank holds, by what they are for, each at its peak.

Weights, gradients and optimizer state are exact, unsharded buffers those of `dmuon.planning.
unsharded`, activations an estimate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from dmuon.partition import Plan
from dmuon.planning.conduct import Conduct
from dmuon.planning.shape import ModelShape
from dmuon.planning.unsharded import FLOAT32, peak_of_unsharded


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        weights: master weights of owned matrices, what a source keeps for its replica, the shards
            of all other parameters, and the model's buffers.
        gradients: of owned matrices and of shards, when all have arrived.
        optimizer: momentum of owned matrices, two moments of shards.
        unsharded: whole weights and gradients of blocks, at their peak.
        activations: kept for the backward, at their peak; an estimate.
    """

    weights: int
    gradients: int
    optimizer: int
    unsharded: int
    activations: int

    @property
    def total(self) -> int:
        """All of them; an upper bound, as they do not peak together."""
        return sum(getattr(self, field.name) for field in fields(self))


def memories(
    shape: ModelShape, plan: Plan, conduct: Conduct, activations: int, ranks: Sequence[int]
) -> list[Memory]:
    """What some ranks hold, numbered as owners."""
    S = conduct.mesh.num_shards
    shards = sum(param.first_shard(S) for param in shape.symmetric)
    owned, sourced = [0] * plan.num_owners, [0] * S
    for matrix, owner in zip(plan.matrices, plan.owners, strict=True):
        owned[owner] += matrix.numel
        sourced[owner % S] += matrix.numel
    has_wire = conduct.weight_itemsize != FLOAT32
    found = []
    for rank in ranks:
        numel = owned[rank]
        kept = sourced[rank % S] - (0 if has_wire else numel)  # an owner's float32 is its master
        weights = numel * FLOAT32 + kept * conduct.weight_itemsize + shards * shape.itemsize
        found.append(
            Memory(
                weights=weights + shape.buffer_bytes,
                gradients=numel * FLOAT32 + shards * shape.itemsize,
                optimizer=numel * FLOAT32 + 2 * shards * shape.itemsize,
                unsharded=peak_of_unsharded(shape, plan, conduct, rank),
                activations=activations,
            )
        )
    return found
