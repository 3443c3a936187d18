"""Bringing what a rank writes into its host memory, a bounded piece at a time.

A sharded tensor goes to its one writer; no rank ever holds the whole model. What travels together
is at most ``EXCHANGE_BYTES``, in one exchange among all ranks: each sends to every writer what it
has of the writer's tensors. On a grid the writer's own row sends, so nothing comes twice.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dmuon.checkpoint.content import Entry, OwnedEntry, PlainEntry, ShardedEntry
from dmuon.checkpoint.host_memory import empty, give_back
from dmuon.checkpoint.snapshot import Snapshot
from dmuon.dedication import Dedication
from dmuon.optimizer import Muon

BUFFER_BYTES = 2**26
"""The most that a save needs beside what a rank writes."""
EXCHANGE_BYTES = BUFFER_BYTES // 4
"""It lies there twice, packed."""


@dataclass(frozen=True)
class Scattered:
    """A tensor in rows over some ranks, which one rank writes; plain facts, equal on all ranks.

    Attributes:
        key: of the entry.
        shape: of the whole.
        dtype: of the whole.
        writer: who gets it.
        senders: who has each shard. Places in the group of all ranks, as the writer.
    """

    key: str
    shape: torch.Size
    dtype: torch.dtype
    writer: int
    senders: Sequence[int]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First byte and end of each shard in the whole."""
        num_rows = self.shape[0]
        row_bytes = self.shape.numel() // max(num_rows, 1) * self.dtype.itemsize
        bounds = row_bounds(num_rows, len(self.senders))
        return [(first * row_bytes, end * row_bytes) for first, end in bounds]


@dataclass(frozen=True)
class Piece:
    """Bytes ``[start, end)`` of every shard of a tensor, as far as the shard goes."""

    of: Scattered
    start: int
    end: int


def contributions(
    dedication: Dedication,
    optimizer: Muon | None,
    entries: Iterable[Entry],
    writer_of: Mapping[str, int],
) -> tuple[Snapshot, list[Scattered]]:
    """What this rank writes of what it has, and its shards of what is to be exchanged.

    Local, but for tensors that are sharded otherwise than by rows: those are gathered here.
    Collective over the mesh where there are any.

    Args:
        dedication: of the model.
        optimizer: where the momentum is.
        entries: equal on all ranks, in one order.
        writer_of: the writer of each by its key, a place in the group of all ranks.
    """
    group = dedication.owner_map.everyone
    me = group.rank()
    senders_of = cache(partial(_senders, group))  # a mesh makes its table of ranks each time
    snapshot = Snapshot(dedication.device)
    scattered: list[Scattered] = []
    for entry in entries:
        writer = writer_of[entry.key]
        if isinstance(entry, ShardedEntry):
            mesh = entry.value.device_mesh
            if mesh.size() == dedication.owner_map.num_owners and is_in_rows(entry.value):
                senders = senders_of(mesh, writer)
                if me in senders:
                    snapshot.add(entry.key, entry.value.to_local(), entry.dtype, entry.value)
                scattered.append(Scattered(entry.key, entry.shape, entry.dtype, writer, senders))
                continue
            # other shards than by rows come whole to every rank, one at a time
            with dedication.engine.order.explained(f"gathering {entry.name} for a checkpoint"):
                whole = entry.value.full_tensor()
            if writer == me:
                snapshot.add_copy(entry.key, whole, entry.dtype)
        elif writer == me and isinstance(entry, PlainEntry):
            snapshot.add_copy(entry.key, entry.value, entry.dtype)
        elif writer == me and isinstance(entry, OwnedEntry):
            _add_owned(snapshot, entry, optimizer)
    return snapshot, scattered


def row_bounds(num_rows: int, num_shards: int) -> list[tuple[int, int]]:
    """First row and end of each shard, as ``torch.chunk`` splits; late ones may be empty."""
    size = -(-num_rows // num_shards) if num_rows else 0
    return [(min(i * size, num_rows), min((i + 1) * size, num_rows)) for i in range(num_shards)]


def is_in_rows(value: DTensor) -> bool:
    """Whether it is split by rows along the last axis of the mesh alone, as by ``fully_shard``."""
    *others, last = value.placements
    return isinstance(last, Shard) and last.dim == 0 and all(p.is_replicate() for p in others)


class Exchange:
    """Brings each tensor to its writer. Local; it takes all memory that it needs.

    A rank that has none says so before the others count on it in a collective.

    Args:
        group: of all ranks, for host memory.
        scattered: equal on all ranks, in one order.
    """

    def __init__(self, group: dist.ProcessGroup, scattered: Sequence[Scattered]) -> None:
        self._group = group
        self._rounds = list(_rounds(scattered))
        self._wholes = {
            each.key: empty(each.shape, each.dtype)
            for each in scattered
            if each.writer == group.rank()
        }
        most = max((_num_bytes(pieces) for pieces in self._rounds), default=0)
        self._sent, self._received = (empty([most], torch.uint8) for _ in range(2))

    def run(self, values: dict[str, torch.Tensor]) -> None:
        """Do it. Collective over the group.

        Args:
            values: the shards of this rank by key, which are dropped when they are sent; then the
                whole tensors that it writes.
        """
        for pieces in self._rounds:
            self._run_round(pieces, values)
        values.update(self._wholes)

    def _run_round(self, pieces: list[Piece], shards: dict[str, torch.Tensor]) -> None:
        """Send my bytes of ``pieces`` to their writers, and put what comes where it belongs.

        Collective over the group.
        """
        outgoing, incoming = self._outgoing(pieces, shards), self._incoming(pieces)
        send_sizes = [sum(part.numel() for part in parts) for parts in outgoing]
        receive_sizes = [sum(part.numel() for part in parts) for parts in incoming]
        sent = self._sent[: sum(send_sizes)]
        received = self._received[: sum(receive_sizes)]
        mine = [part for parts in outgoing for part in parts]
        for room, part in zip(sent.split([p.numel() for p in mine]), mine, strict=True):
            room.copy_(part)
        dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=self._group)
        targets = [target for parts in incoming for target in parts]
        for target, part in zip(targets, received.split([t.numel() for t in targets]), strict=True):
            target.copy_(part)
        for piece in pieces:
            first, end = piece.of.spans[0]
            if piece.end == end - first:
                shards.pop(piece.of.key, None)
            elif piece.of.key in shards:
                give_back(shards[piece.of.key], piece.start, piece.end)

    def _outgoing(
        self, pieces: list[Piece], shards: Mapping[str, torch.Tensor]
    ) -> list[list[torch.Tensor]]:
        """What goes to each rank."""
        me = self._group.rank()
        parts: list[list[torch.Tensor]] = [[] for _ in range(self._group.size())]
        for piece in pieces:
            if me in piece.of.senders:
                part = _bytes(shards[piece.of.key])[piece.start : piece.end]
                parts[piece.of.writer].append(part)
        return parts

    def _incoming(self, pieces: list[Piece]) -> list[list[torch.Tensor]]:
        """Where what comes from each rank belongs."""
        me = self._group.rank()
        parts: list[list[torch.Tensor]] = [[] for _ in range(self._group.size())]
        for piece in pieces:
            each = piece.of
            if each.writer == me:
                whole = _bytes(self._wholes[each.key])
                for sender, (first, end) in zip(each.senders, each.spans, strict=True):
                    parts[sender].append(whole[first:end][piece.start : piece.end])
        return parts


def _add_owned(snapshot: Snapshot, entry: OwnedEntry, optimizer: Muon | None) -> None:
    if entry.kind == "momentum_buffer":
        assert optimizer is not None
        value = optimizer.state[entry.param.param]["momentum_buffer"]
        snapshot.add(entry.key, value, entry.dtype)
        return
    assert entry.parcel.master is not None  # it is written by its owner
    value = entry.parcel.view(entry.parcel.master, entry.param)
    snapshot.add(entry.key, value, entry.dtype, entry.param.param)


def _rounds(scattered: Iterable[Scattered]) -> Iterator[list[Piece]]:
    """Pieces in order, as many together as fit into the buffer."""
    together: list[Piece] = []
    used = 0
    for piece in _in_step(scattered):
        size = _num_bytes([piece])
        if together and used + size > EXCHANGE_BYTES:
            yield together
            together, used = [], 0
        together.append(piece)
        used += size
    if together:
        yield together


def _in_step(scattered: Iterable[Scattered]) -> list[Piece]:
    """All pieces, so that what every writer gets grows as what every sender has shrinks."""
    pieces = [piece for each in scattered for piece in _pieces(each)]
    total: Counter[int] = Counter()
    done: list[int] = []
    for piece in pieces:
        total[piece.of.writer] += _num_bytes([piece])
        done.append(total[piece.of.writer])
    order = sorted(range(len(pieces)), key=lambda i: done[i] / total[pieces[i].of.writer])
    return [pieces[i] for i in order]


def _pieces(each: Scattered) -> Iterator[Piece]:
    first, end = each.spans[0]
    step = max(1, EXCHANGE_BYTES // len(each.senders))
    for start in range(0, end - first, step):
        yield Piece(each, start, min(start + step, end - first))


def _num_bytes(pieces: Iterable[Piece]) -> int:
    """Of all shards together, at most."""
    return sum((piece.end - piece.start) * len(piece.of.senders) for piece in pieces)


def _senders(group: dist.ProcessGroup, mesh: DeviceMesh, writer: int) -> list[int]:
    """Who sends each shard to ``writer``: its own row. Places in ``group``, as the writer."""
    ranks = dist.get_process_group_ranks(group)
    rows: list[list[int]] = mesh.mesh.reshape(-1, mesh.size(-1)).tolist()
    row = next(row for row in rows if ranks[writer] in row)
    return [ranks.index(rank) for rank in row]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
