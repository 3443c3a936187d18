"""Who owns what: a pure function of names, shapes and the number of owners."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dmuon.balance import Item, distribute
from dmuon.layout import Layout, make_layout
from dmuon.newton_schulz import newton_schulz_flops
from dmuon.placement import place

BYTES_OWNED_PER_ELEMENT = 8  # float32 master weight and float32 momentum


@dataclass(frozen=True)
class Matrix:
    """What the plan needs to know about one dedicated parameter, which may hold several matrices.

    Attributes:
        name: fully qualified, as in the original model's state dict.
        shape: of the parameter.
        block: the module whose matrices are sent together.
        layout: where its matrices are; by default what the shape alone says: ``(M, N)`` is a
            matrix, ``(E, M, N)`` a stack.

    Raises:
        SetupError: for a shape that holds no matrix, when no layout is given.
    """

    name: str
    shape: tuple[int, ...]
    block: str
    layout: Layout = field(default=None)  # type: ignore[assignment]  # made from the shape

    def __post_init__(self) -> None:
        if self.layout is None:
            object.__setattr__(self, "layout", make_layout(self.name, self.shape))

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def cost(self) -> int:
        """Newton-Schulz work of one update, in floating point operations."""
        return sum(B * newton_schulz_flops(m, n) for B, m, n in self.layout.parts)

    @property
    def num_matrices(self) -> int:
        """How many matrices one update orthogonalises."""
        return self.layout.num_matrices


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
    def num_matrices_per_owner(self) -> list[int]:
        """How many matrices each owner orthogonalises in one step: experts, groups, parts."""
        return self._per_owner([matrix.num_matrices for matrix in self.matrices])

    @property
    def imbalance(self) -> float:
        """Newton-Schulz work of the busiest owner over the mean; 1.0 is perfect."""
        cost = self.cost_per_owner
        return max(cost) * self.num_owners / sum(cost) if self.matrices else 1.0

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
            "num_matrices_per_owner": self.num_matrices_per_owner,
            "matrices": [
                {
                    "name": m.name,
                    "shape": list(m.shape),
                    "block": m.block,
                    "owner": owner,
                    "kind": m.layout.kind,
                    "parts": [list(part) for part in m.layout.parts],
                    "split_dim": None if m.layout.split is None else m.layout.split.dim,
                }
                for m, owner in zip(self.matrices, self.owners, strict=True)
            ],
        }

    def __str__(self) -> str:
        rows = [("parameter", "shape", "owner", "GFLOP", "MiB", "held as")]
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            shape = "x".join(map(str, matrix.shape))
            work, size = f"{matrix.cost / 1e9:.3f}", f"{_mib(matrix):.2f}"
            held_as = "" if str(matrix.layout) == "matrix" else str(matrix.layout)
            rows.append((matrix.name, shape, str(owner), work, size, held_as))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:]), held_as]).rstrip()
            for name, *cells, held_as in rows
        ]
        return "\n".join([*lines, *self._totals()])

    def _totals(self) -> list[str]:
        lines = [
            f"owner {owner}: {self.owners.count(owner)} parameters with {count} matrices, "
            f"{cost / 1e9:.3f} GFLOP of Newton-Schulz a step, "
            f"{size / 2**20:.2f} MiB of weights and momentum"
            for owner, (count, cost, size) in enumerate(
                zip(
                    self.num_matrices_per_owner,
                    self.cost_per_owner,
                    self.bytes_per_owner,
                    strict=True,
                )
            )
        ]
        return [*lines, f"busiest owner over the mean: {self.imbalance:.3f}"]

    def _per_owner(self, amounts: Sequence[int]) -> list[int]:
        totals = [0] * self.num_owners
        for owner, amount in zip(self.owners, amounts, strict=True):
            totals[owner] += amount
        return totals


def _mib(matrix: Matrix) -> float:
    return matrix.numel * BYTES_OWNED_PER_ELEMENT / 2**20


def make_plan(matrices: Sequence[Matrix], num_owners: int) -> Plan:
    """Give every matrix an owner.

    First each owner gets a number of matrices of each kind, so that Newton-Schulz work and bytes
    are balanced (`dmuon.balance`). Which ones is then free: those of one block go to owners that
    hold least of it, so that one block's broadcasts come from different ranks.

    Raises:
        ValueError: when there is no owner.
    """
    if num_owners < 1:
        raise ValueError(f"num_owners must be at least 1, got {num_owners}")
    items = [Item(matrix.cost, matrix.numel) for matrix in matrices]
    blocks = [matrix.block for matrix in matrices]
    owners = place(items, blocks, distribute(items, num_owners))
    return Plan(tuple(matrices), tuple(owners), num_owners)
