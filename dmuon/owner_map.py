"""From an owner's number to the collectives that reach it: the only place that knows the mesh.

A mesh is a grid of ``R`` replicas (rows) by ``S`` shards (columns); a 1D mesh has one row. The
owner numbered ``k`` sits at row ``k // S``, column ``k % S``. All ranks of its column are
*sources*: in every row, the source broadcasts the weights to its row before use. Gradients go the
other way, along the row to the source, then along the column to the owner; new weights are
published down the column.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dmuon import torch_internals
from dmuon.errors import SetupError


@dataclass(frozen=True)
class Leg:
    """One collective of a route, as this rank sees it.

    Attributes:
        group: the process group.
        root: the rank inside the group that sends (weights) or receives (gradients).
    """

    group: dist.ProcessGroup
    root: int

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.group.size()

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return self.group.rank() == self.root


@dataclass(frozen=True)
class Route:
    """How one owner's matrices travel, as this rank sees it.

    Attributes:
        is_owner: this rank holds the float32 master weights and the momentum.
        is_source: this rank sends the weights to its row.
        unshard: the leg that makes the weights whole on every rank of the row.
        start: the legs that bring the first row's weights to all sources at set-up.
        reduce: the legs gradients take, in order; a rank takes part in those it is listed with.
        publish: the legs new weights take after a step; empty where nobody waits for them.
    """

    is_owner: bool
    is_source: bool
    unshard: Leg
    start: tuple[Leg, ...]
    reduce: tuple[Leg, ...]
    publish: tuple[Leg, ...]


class OwnerMap(Protocol):
    """What every kind of mesh offers."""

    @property
    def num_owners(self) -> int:
        """Number of ranks that can own a matrix."""

    @property
    def num_replicas(self) -> int:
        """Number of rows: how often each symmetric shard exists."""

    @property
    def rank(self) -> int:
        """This rank's own number as an owner."""

    @property
    def everyone(self) -> dist.ProcessGroup:
        """All ranks of the mesh in ascending order, owner 0 first, for checks and dicts."""

    @property
    def control(self) -> dist.ProcessGroup | None:
        """A CPU group over all ranks of the mesh for ``CallOrder``; None where there is none."""

    def place_of(self, owner: int) -> int:
        """The rank of ``owner`` in the group ``everyone``, which is ordered by global ranks."""

    def route(self, owner: int) -> Route:
        """How the matrices of ``owner`` travel."""

    def groups(self) -> list[dist.ProcessGroup]:
        """Every process group made here."""


class ShardOwners:
    """Owners of a 1D mesh: one row, so gradients take one leg and nothing is published."""

    def __init__(self, mesh: DeviceMesh, timeout: timedelta | None) -> None:
        ranks = mesh.mesh.flatten().tolist()
        self._unshard = _own_group("unshard", ranks, timeout)
        self._reduce = _own_group("reduce", ranks, timeout)
        self.everyone = _own_group("everyone", ranks, timeout)
        self.control = _control_group(ranks, timeout)
        self.num_owners = len(ranks)
        self.num_replicas = 1
        self.rank = self.everyone.rank()

    def place_of(self, owner: int) -> int:
        """The rank of ``owner`` in the group ``everyone``."""
        return owner

    def route(self, owner: int) -> Route:
        """How the matrices of ``owner`` travel."""
        is_owner = owner == self.rank
        return Route(
            is_owner=is_owner,
            is_source=is_owner,
            unshard=Leg(self._unshard, owner),
            start=(),
            reduce=(Leg(self._reduce, owner),),
            publish=(),
        )

    def groups(self) -> list[dist.ProcessGroup]:
        """Every process group made here."""
        return [self._unshard, self._reduce, self.everyone]


class GridOwners:
    """Owners of a ``(replicate, shard)`` mesh: one owner a matrix over all its ranks."""

    def __init__(self, ranks_RS: torch.Tensor, timeout: timedelta | None) -> None:
        rows, columns = ranks_RS.tolist(), ranks_RS.T.tolist()
        me = dist.get_rank()
        self._row = next(i for i, row in enumerate(rows) if me in row)
        self._column = next(i for i, column in enumerate(columns) if me in column)
        self._num_columns = len(columns)
        self.rank = self._row * self._num_columns + self._column
        everyone = ranks_RS.flatten().tolist()
        self._unshard = _own_group("unshard", rows[self._row], timeout)
        self._reduce_row = _own_group("reduce", rows[self._row], timeout)
        self._reduce_column = _own_group("reduce column", columns[self._column], timeout)
        self._publish = _own_group("publish", columns[self._column], timeout)
        self.everyone = _own_group("everyone", everyone, timeout)
        self.control = _control_group(everyone, timeout)
        self.num_owners = ranks_RS.numel()
        self.num_replicas = len(rows)
        self._places = [sorted(everyone).index(rank) for rank in everyone]

    def place_of(self, owner: int) -> int:
        """The rank of ``owner`` in the group ``everyone``."""
        return self._places[owner]

    def route(self, owner: int) -> Route:
        """How the matrices of ``owner`` travel."""
        row, column = divmod(owner, self._num_columns)
        is_source = column == self._column
        to_source = Leg(self._reduce_row, column)
        return Route(
            is_owner=owner == self.rank,
            is_source=is_source,
            unshard=Leg(self._unshard, column),
            start=(Leg(self._publish, 0),) if is_source else (),
            reduce=(to_source, Leg(self._reduce_column, row)) if is_source else (to_source,),
            publish=(Leg(self._publish, row),) if is_source else (),
        )

    def groups(self) -> list[dist.ProcessGroup]:
        """Every process group made here."""
        own = [self._unshard, self._reduce_row, self._reduce_column, self._publish]
        return [*own, self.everyone]


CONNECT_TIMEOUT = timedelta(minutes=2)

# Groups live as long as the default group; a second model on the same ranks uses the same ones.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[object, dist.ProcessGroup]] = WeakKeyDictionary()


def _own_group(
    purpose: str, ranks: list[int], timeout: timedelta | None, backend: str | None = None
) -> dist.ProcessGroup:
    """A group over ``ranks``, so that a user's collectives cannot come between ours.

    Collective over ``ranks`` the first time.
    """
    world = dist.group.WORLD
    assert world is not None
    made = _made.setdefault(world, {})
    key = (purpose, tuple(ranks), timeout)
    if key not in made:
        group = dist.new_group(
            ranks, timeout=timeout, backend=backend, use_local_synchronization=True
        )
        assert isinstance(group, dist.ProcessGroup)
        made[key] = group
    return made[key]


def cpu_group(purpose: str, like: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """A group over the ranks of ``like`` for host memory, used for ``purpose`` alone.

    Collective over ``like`` the first time, when all must be there within `CONNECT_TIMEOUT`: nobody
    notices that a rank has died before it has joined.
    """
    ranks = dist.get_process_group_ranks(like)
    connecting = min(timeout, CONNECT_TIMEOUT)
    group = _own_group(f"{purpose}, {timeout}", ranks, connecting, backend="gloo")
    torch_internals.set_timeout(group, timeout)
    return group


def _control_group(ranks: list[int], timeout: timedelta | None) -> dist.ProcessGroup | None:
    if len(ranks) == 1 or not dist.is_gloo_available():
        return None
    try:
        return _own_group("control", ranks, timeout, backend="gloo")
    except RuntimeError as error:
        raise SetupError(
            "the ranks could not make a gloo group, over which they compare their calls; set "
            f"GLOO_SOCKET_IFNAME to the network interface that joins them ({error})"
        ) from error
