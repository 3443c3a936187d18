"""Who owns what: a pure function of names, shapes and the number of owners."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dmuon.newton_schulz import newton_schulz_flops

BYTES_OWNED_PER_ELEMENT = 8  # float32 master weight and float32 momentum


@dataclass(frozen=True)
class Matrix:
    """What the plan needs to know about one hidden matrix.

    Attributes:
        name: fully qualified, as in the original model's state dict.
        shape: ``(M, N)``.
        block: the module whose matrices are sent together.
    """

    name: str
    shape: tuple[int, ...]
    block: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        rows, columns = self.shape
        return rows * columns

    @property
    def cost(self) -> int:
        """Newton-Schulz work of one update, in floating point operations."""
        rows, columns = self.shape
        return newton_schulz_flops(rows, columns)


@dataclass(frozen=True)
class Plan:
    """The owner of every hidden matrix; equal on all ranks. ``print(plan)`` shows the table.

    Attributes:
        matrices: in the order of the model.
        owners: the owner of each, an index in ``range(num_owners)``.
        num_owners: how many ranks share the work (replicate x shard).
    """

    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    num_owners: int
    _index: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = {matrix.name: index for index, matrix in enumerate(self.matrices)}
        object.__setattr__(self, "_index", names)

    def owner_of(self, name: str) -> int:
        """The owner of the matrix called ``name``; KeyError when there is none."""
        return self.owners[self._index[name]]

    @property
    def cost_per_owner(self) -> list[int]:
        """Newton-Schulz operations of each owner in one step."""
        return self._per_owner([matrix.cost for matrix in self.matrices])

    @property
    def bytes_per_owner(self) -> list[int]:
        """Bytes of master weights and momentum (float32 each) that each owner holds."""
        sizes = [matrix.numel * BYTES_OWNED_PER_ELEMENT for matrix in self.matrices]
        return self._per_owner(sizes)

    @property
    def imbalance(self) -> float:
        """Newton-Schulz work of the busiest owner over the mean; 1.0 is perfect."""
        cost = self.cost_per_owner
        return max(cost) * self.num_owners / sum(cost)

    def digest(self) -> str:
        """SHA-256 of the whole plan, to compare between ranks."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, object]:
        """The plan as plain data, for logs and JSON."""
        return {
            "num_owners": self.num_owners,
            "imbalance": self.imbalance,
            "cost_per_owner": self.cost_per_owner,
            "bytes_per_owner": self.bytes_per_owner,
            "matrices": [
                {"name": m.name, "shape": list(m.shape), "block": m.block, "owner": owner}
                for m, owner in zip(self.matrices, self.owners, strict=True)
            ],
        }

    def __str__(self) -> str:
        width = max(len(matrix.name) for matrix in self.matrices)
        lines = [f"{'matrix':{width}}  {'shape':>14}  owner  {'NS GFLOP':>9}"]
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            shape = "x".join(map(str, matrix.shape))
            lines.append(
                f"{matrix.name:{width}}  {shape:>14}  {owner:5d}  {matrix.cost / 1e9:9.3f}"
            )
        for owner, (cost, size) in enumerate(
            zip(self.cost_per_owner, self.bytes_per_owner, strict=True)
        ):
            count = self.owners.count(owner)
            lines.append(
                f"owner {owner}: {count} matrices, {cost / 1e9:.3f} GFLOP a step, "
                f"{size / 2**20:.1f} MiB of weights and momentum"
            )
        lines.append(f"busiest owner over the mean: {self.imbalance:.3f}")
        return "\n".join(lines)

    def _per_owner(self, amounts: Sequence[int]) -> list[int]:
        totals = [0] * self.num_owners
        for owner, amount in zip(self.owners, amounts, strict=True):
            totals[owner] += amount
        return totals


def make_plan(matrices: Sequence[Matrix], num_owners: int) -> Plan:
    """Give every matrix an owner.

    Longest processing time first (Graham 1969) on the larger of an owner's shares of the
    Newton-Schulz work and of the bytes; between equals the owner with the fewest bytes of the
    same block, so that one block's broadcasts come from different ranks.
    """
    if num_owners < 1:
        raise ValueError(f"num_owners must be at least 1, got {num_owners}")
    total_cost = sum(matrix.cost for matrix in matrices) or 1
    total_numel = sum(matrix.numel for matrix in matrices) or 1
    cost, numel = [0] * num_owners, [0] * num_owners
    in_block: Counter[tuple[str, int]] = Counter()
    owners = [0] * len(matrices)
    order = sorted(range(len(matrices)), key=lambda i: (-matrices[i].cost, i))
    for index in order:
        matrix = matrices[index]

        def load(owner: int, matrix: Matrix = matrix) -> tuple[float, int, int]:
            work = (cost[owner] + matrix.cost) / total_cost
            memory = (numel[owner] + matrix.numel) / total_numel
            return round(max(work, memory), 9), in_block[matrix.block, owner], owner

        owner = min(range(num_owners), key=load)
        owners[index] = owner
        cost[owner] += matrix.cost
        numel[owner] += matrix.numel
        in_block[matrix.block, owner] += matrix.numel
    return Plan(tuple(matrices), tuple(owners), num_owners)
