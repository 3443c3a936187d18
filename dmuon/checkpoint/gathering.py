"""Bringing what a rank writes into its host memory, a bounded piece at a time.

A sharded tensor goes to its one writer; no rank ever holds the whole model. What travels together
is at most ``BUFFER_BYTES``, in one exchange among all ranks: each sends to every writer what it has
of the writer's tensors. On a grid the writer's own row sends, so nothing comes twice.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dmuon.checkpoint.content import Entry, OwnedEntry, PlainEntry, ShardedEntry
from dmuon.dedication import Dedication
from dmuon.optimizer import Muon

BUFFER_BYTES = 2**26


@dataclass(frozen=True)
class Piece:
    """Bytes ``[start, end)`` of every shard of a tensor, as far as the shard goes."""

    entry: ShardedEntry
    start: int
    end: int


def collect(
    dedication: Dedication,
    optimizer: Muon | None,
    entries: Iterable[Entry],
    writer_of: Mapping[str, int],
) -> dict[str, torch.Tensor]:
    """Copies, in host memory, of the tensors that this rank writes. Collective over the mesh.

    Args:
        dedication: of the model.
        optimizer: where the momentum is.
        entries: equal on all ranks, in one order.
        writer_of: the writer of each by its key, a place in the group of all ranks.

    Returns:
        By key.
    """
    me = dedication.owner_map.everyone.rank()
    collected: dict[str, torch.Tensor] = {}
    sharded: list[ShardedEntry] = []
    for entry in entries:
        is_mine = writer_of[entry.key] == me
        covers_all = isinstance(entry, ShardedEntry) and (
            entry.value.device_mesh.size() == dedication.owner_map.num_owners
        )
        if isinstance(entry, ShardedEntry) and covers_all and is_in_rows(entry.value):
            sharded.append(entry)
            if is_mine:
                collected[entry.key] = torch.empty(entry.shape, dtype=entry.dtype)
            continue
        whole: torch.Tensor | None = None
        if isinstance(entry, ShardedEntry):
            # other shards than by rows come whole to every rank, one at a time
            with dedication.engine.order.explained(f"gathering {entry.name} for a checkpoint"):
                whole = entry.value.full_tensor()
        if is_mine:
            value = _held_value(entry, optimizer) if whole is None else whole
            collected[entry.key] = value.detach().to("cpu", entry.dtype, copy=True).contiguous()
    for pieces in _exchanges(sharded):
        _exchange(dedication, pieces, writer_of, collected)
    return collected


def row_bounds(num_rows: int, num_shards: int) -> list[tuple[int, int]]:
    """First row and end of each shard, as ``torch.chunk`` splits; late ones may be empty."""
    size = -(-num_rows // num_shards) if num_rows else 0
    return [(min(i * size, num_rows), min((i + 1) * size, num_rows)) for i in range(num_shards)]


def is_in_rows(value: DTensor) -> bool:
    """Whether it is split by rows along the last axis of the mesh alone, as by ``fully_shard``."""
    *others, last = value.placements
    return isinstance(last, Shard) and last.dim == 0 and all(p.is_replicate() for p in others)


def _held_value(entry: Entry, optimizer: Muon | None) -> torch.Tensor:
    if isinstance(entry, PlainEntry):
        return entry.value
    assert isinstance(entry, OwnedEntry)
    if entry.kind == "momentum_buffer":
        assert optimizer is not None
        return optimizer.state[entry.param.param]["momentum_buffer"]
    assert entry.parcel.master is not None  # it is written by its owner
    return entry.parcel.views(entry.parcel.master)[entry.parcel.params.index(entry.param)]


def _exchanges(entries: Iterable[ShardedEntry]) -> Iterator[list[Piece]]:
    """Pieces in order, as many together as fit into the buffer."""
    together: list[Piece] = []
    used = 0
    for entry in entries:
        num_shards = entry.value.device_mesh.size(-1)
        first, end = row_bounds(entry.shape[0], num_shards)[0]
        shard_bytes = (end - first) * (entry.num_bytes // max(entry.shape[0], 1))
        step = max(1, BUFFER_BYTES // num_shards)
        for start in range(0, shard_bytes, step):
            piece = Piece(entry, start, min(start + step, shard_bytes))
            size = (piece.end - piece.start) * num_shards
            if together and used + size > BUFFER_BYTES:
                yield together
                together, used = [], 0
            together.append(piece)
            used += size
    if together:
        yield together


def _exchange(
    dedication: Dedication,
    pieces: list[Piece],
    writer_of: Mapping[str, int],
    collected: dict[str, torch.Tensor],
) -> None:
    """Send my bytes of ``pieces`` to their writers, and put what comes where it belongs.

    Collective over the mesh.
    """
    group = dedication.owner_map.everyone
    me = group.rank()
    to_writer: list[list[torch.Tensor]] = [[] for _ in range(group.size())]
    from_sender: list[list[torch.Tensor]] = [[] for _ in range(group.size())]
    for piece in pieces:
        writer = writer_of[piece.entry.key]
        senders = _senders(group, piece.entry.value.device_mesh, writer)
        if me in senders:
            to_writer[writer].append(_bytes(piece.entry.value.to_local())[piece.start : piece.end])
        if writer == me:
            whole = _bytes(collected[piece.entry.key])
            for sender, target in zip(senders, _shards(piece.entry, whole), strict=True):
                from_sender[sender].append(target[piece.start : piece.end])
    sent = torch.cat([part for parts in to_writer for part in parts] or [_nothing(dedication)])
    send_sizes = [sum(part.numel() for part in parts) for parts in to_writer]
    receive_sizes = [sum(part.numel() for part in parts) for parts in from_sender]
    received = sent.new_empty(sum(receive_sizes))
    with dedication.engine.order.explained("gathering sharded tensors for a checkpoint"):
        dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=group)
    targets = [target for parts in from_sender for target in parts]
    for target, part in zip(targets, received.split([t.numel() for t in targets]), strict=True):
        target.copy_(part)


def _senders(group: dist.ProcessGroup, mesh: DeviceMesh, writer: int) -> list[int]:
    """Who sends each shard to ``writer``: its own row. Places in ``group``, as the writer."""
    ranks = dist.get_process_group_ranks(group)
    rows: list[list[int]] = mesh.mesh.reshape(-1, mesh.size(-1)).tolist()
    row = next(row for row in rows if ranks[writer] in row)
    return [ranks.index(rank) for rank in row]


def _shards(entry: ShardedEntry, whole: torch.Tensor) -> list[torch.Tensor]:
    """The bytes of each shard inside those of the whole tensor."""
    row_bytes = entry.num_bytes // max(entry.shape[0], 1)
    bounds = row_bounds(entry.shape[0], entry.value.device_mesh.size(-1))
    return [whole[first * row_bytes : end * row_bytes] for first, end in bounds]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _nothing(dedication: Dedication) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=dedication.device)
