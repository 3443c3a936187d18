"""How long a step takes on a cluster, and what limits it.

Communication runs under forward and backward as far as these last, which is the best case; what is
left of it, and the optimizer, come on top.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dmuon.newton_schulz import newton_schulz_flops
from dmuon.partition import Matrix, Plan
from dmuon.planning.cluster import Cluster
from dmuon.planning.traffic import Traffic

# Bytes that pass through memory for an element in float32. AdamW reads weight, gradient and two
# moments and writes three of them. Muon reads gradient and momentum and writes the momentum and
# what is to be orthogonalised, then reads that and the weight and writes it; 16 bits between.
_ADAMW_BYTES = 28
_MUON_BYTES = 24


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank.

    Attributes:
        compute: forward and backward.
        communication: all collectives, of which what exceeds ``compute`` is waited for.
        newton_schulz: on the busiest owner.
        elementwise: the rest of the optimizer.
    """

    compute: float
    communication: float
    newton_schulz: float
    elementwise: float

    @property
    def exposed(self) -> float:
        """Communication that is waited for."""
        return max(0.0, self.communication - self.compute)

    @property
    def total(self) -> float:
        """The whole step."""
        return self.compute + self.exposed + self.newton_schulz + self.elementwise


@dataclass(frozen=True)
class Work:
    """What a rank does in a step beside communicating.

    Attributes:
        flops: of forward and backward.
        newton_schulz: operations of the busiest owner.
        owned: elements that the fullest owner updates by Muon.
        shards: elements that a rank updates by AdamW.
        is_16_bit: whether forward and backward compute in 16 bits.
        is_16_bit_newton_schulz: whether Newton-Schulz does.
    """

    flops: float
    newton_schulz: int
    owned: int
    shards: int
    is_16_bit: bool
    is_16_bit_newton_schulz: bool


def step_time(work: Work, traffic: Sequence[Traffic], cluster: Cluster) -> StepTime:
    """The time of a step."""
    rates = cluster.rates
    peak = rates.bfloat16 if work.is_16_bit else rates.float32
    ns_peak = rates.bfloat16 if work.is_16_bit_newton_schulz else rates.float32
    moved = work.owned * _MUON_BYTES + work.shards * _ADAMW_BYTES
    return StepTime(
        compute=work.flops / (peak * cluster.achieved),
        communication=sum(each.seconds for each in traffic),
        newton_schulz=work.newton_schulz / (ns_peak * cluster.achieved_newton_schulz),
        elementwise=moved / rates.memory_rate,
    )


def newton_schulz_per_owner(plan: Plan, steps: int) -> list[int]:
    """Operations of every owner in one update, in so many steps of Newton-Schulz."""
    totals = [0] * plan.num_owners
    for matrix, owner in zip(plan.matrices, plan.owners, strict=True):
        totals[owner] += operations(matrix, steps)
    return totals


def operations(matrix: Matrix, steps: int) -> int:
    """Of one update of a parameter."""
    return sum(B * newton_schulz_flops(m, n, steps) for B, m, n in matrix.layout.parts)
