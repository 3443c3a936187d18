"""Saving a checkpoint: every tensor is written by one rank, the manifest last.

An asynchronous save copies what a rank has into its host memory beside the next forward and
backward; whatever is about to change the values, such as ``step``, waits for that alone. Then the
ranks exchange, write and meet over a CPU group of their own. So either all learn that the
checkpoint is good, or all learn what kept it from being so.
"""

import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from dmuon import dedication as dedications
from dmuon import torch_internals
from dmuon.call_order import Call
from dmuon.checkpoint.assignment import Item, assign
from dmuon.checkpoint.committing import Ready, Work
from dmuon.checkpoint.content import (
    Content,
    Entry,
    OwnedEntry,
    PlainEntry,
    ShardedEntry,
    content_of,
)
from dmuon.checkpoint.file_names import check_plain, given_path, local_path
from dmuon.checkpoint.gathering import contributions
from dmuon.checkpoint.handle import SaveHandle
from dmuon.checkpoint.index_file import INDEX_FILE
from dmuon.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    OptimizerFacts,
)
from dmuon.checkpoint.meeting import tell_all
from dmuon.checkpoint.unfinished import begin
from dmuon.dedication import Dedication
from dmuon.errors import CheckpointError
from dmuon.flags import check_flags
from dmuon.optimizer import Muon
from dmuon.optimizer_state import dedication_of, plain_group
from dmuon.owner_map import cpu_group
from dmuon.splits import splits_of

_TIMEOUT = timedelta(minutes=30)
_PACKAGES = ("dmuon", "torch", "safetensors")
_last: WeakKeyDictionary[Dedication, SaveHandle] = WeakKeyDictionary()


@dataclass
class _Lane:
    """Where saves over the same ranks meet in the background, one after another.

    Attributes:
        last: the newest of them, of whatever model; the next waits for it, as on all ranks.
        number: of the group; equal on all ranks. One that failed on any rank is never used again.
    """

    last: SaveHandle | None = None
    number: int = 0

    @property
    def next_number(self) -> int:
        """What this rank knows of it."""
        return self.number + (self.last is not None and self.last._has_lost_group)


_lanes: WeakKeyDictionary[dist.ProcessGroup, _Lane] = WeakKeyDictionary()


def save_checkpoint(  # noqa: PLR0913 - the public signature
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Muon | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    async_save: bool = False,
    timeout: timedelta = _TIMEOUT,
) -> SaveHandle:
    """Write a checkpoint that any mesh can load and ``transformers`` can open. Collective.

    Each rank writes whole tensors: owners their matrices and momentum, the others are shared out
    by size; no rank ever holds the whole model. The folder is a checkpoint when its manifest is
    there, which is written last.

    Args:
        path: a folder, no URL, that does not exist or is empty, on storage all ranks share. What a
            save left there that was killed is moved beside it, with a warning on the first rank. A
            folder in which another save is going on is refused, where the storage has locks.
        model: as given to ``dedicate_params``.
        optimizer: its ``dmuon.Muon``; None saves weights alone.
        step: optimizer steps done; by default what the optimizer has counted.
        extra: plain data of yours for the manifest (that of the first rank counts).
        files: small files of yours by name, such as ``config.json`` (of the first rank).
        async_save: return at once, and copy the values to host memory and write them beside what
            follows; ``step`` waits for the copies. Call ``wait()`` before the process ends, and
            ``wait_copied()`` before weights or state are changed by hand. The next save of this
            model waits for this one, and raises what went wrong with it, unless all ranks have
            been told. A process that ends without ``wait()`` is kept until the checkpoint is
            committed, for ``timeout`` at most, and for a minute at most when an exception has
            ended it; what fails then is a warning.
        timeout: how long a rank that has written waits for the others; equal on all ranks. One
            that has died is noticed at once.

    Returns:
        A handle; without ``async_save`` it is done.

    Raises:
        CheckpointError: on every rank: the folder is in use, a rank could not write, ...; nothing
            that was there before is changed.
        CollectiveError: another rank is gone; what is in the folder is no checkpoint.
    """
    check_flags(async_save=async_save)
    dedication = dedications.of(model) if optimizer is None else dedication_of(model, optimizer)
    dedication.settle_for(Call.SAVE_CHECKPOINT)
    given = _Given(path, step, extra or {}, files or {}, timeout)
    folder = given_path(path).absolute()  # the process may go elsewhere while it is written
    work = _prepare(folder, dedication, optimizer, given, is_beside=async_save)
    lane = _lane_of(dedication)
    handle = SaveHandle(folder, work.snapshot, after=None if work.group is None else lane.last)
    _last[dedication] = lane.last = handle
    if async_save:
        work.snapshot.begin()
        handle._run_beside(work, timeout)
        dedication.wait_for_readers = work.snapshot.wait
    else:
        handle._run(work)
        del _last[dedication]
        handle.wait()
    return handle


@dataclass(frozen=True)
class _Given:
    """What the caller gives."""

    path: str | os.PathLike[str]
    step: int | None
    extra: Mapping[str, Any]
    files: Mapping[str, bytes]
    timeout: timedelta


@torch.no_grad()
@torch_internals.outside_inference_mode()
def _prepare(
    folder: Path,
    dedication: Dedication,
    optimizer: Muon | None,
    given: _Given,
    *,
    is_beside: bool,
) -> Work:
    """Everything that training has to wait for. Collective over the mesh."""
    previous = _last.pop(dedication, None)
    unheard = None if previous is None else previous._unheard_error()
    started = () if optimizer is None else optimizer.state
    mine = [param.name for param in dedication.params if param.param in started]
    lane = _lane_of(dedication)
    everyones = tell_all(dedication, (unheard, mine, lane.next_number))
    lane.number = max(number for _, _, number in everyones)
    if error := next((error for error, _, _ in everyones if error is not None), None):
        raise error
    have_momentum = frozenset(name for _, names, _ in everyones for name in names)
    content = content_of(dedication, optimizer, have_momentum)
    _agree(folder, dedication, content, given.timeout)
    ready = Ready()
    if dedication.owner_map.everyone.rank() == 0:
        ready = _make_ready(folder, dedication, optimizer, content, given)
    if problem := next(filter(None, tell_all(dedication, ready.problem)), None):
        raise CheckpointError(folder, problem)
    items = [_item(entry, dedication) for entry in content.entries]
    assignment = assign(items, dedication.owner_map.num_owners)
    writer_of = {
        entry.key: assignment.writer(entry.section, entry.name) for entry in content.entries
    }
    snapshot, scattered = contributions(dedication, optimizer, content.entries, writer_of)
    group = dedication.owner_map.everyone
    background: dist.ProcessGroup | None = None
    if group.size() > 1:
        try:
            background = cpu_group(f"checkpoint {lane.number}", group, given.timeout)
        except RuntimeError as error:
            raise CheckpointError(
                folder, f"another rank is gone, so nothing was written: {error}"
            ) from error
    return Work(
        folder, content.entries, assignment, snapshot, scattered, background, ready, is_beside
    )


def _lane_of(dedication: Dedication) -> _Lane:
    return _lanes.setdefault(dedication.owner_map.everyone, _Lane())


def _item(entry: Entry, dedication: Dedication) -> Item:
    owner = None
    if isinstance(entry, OwnedEntry):
        owner = dedication.owner_map.place_of(entry.parcel.owner)
    elif isinstance(entry, PlainEntry):
        owner = 0  # ranks may differ, as running statistics do; state dicts take the first too
    return Item(entry.name, entry.section, entry.num_bytes, owner)


def _agree(folder: Path, dedication: Dedication, content: Content, timeout: timedelta) -> None:
    lines = [f"{e.key} {tuple(e.shape)} {e.dtype} {type(e).__name__}" for e in content.entries]
    lines += [str(folder), str(timeout), *map(str, content.tied.items())]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests = tell_all(dedication, digest)
    if different := [rank for rank, each in enumerate(digests) if each != digests[0]]:
        raise CheckpointError(
            folder,
            f"ranks {different} of the mesh would write other tensors, or to another path, than "
            "rank 0; all ranks must pass the same path and timeout and have the same model",
        )


def _make_ready(
    folder: Path, dedication: Dedication, optimizer: Muon | None, content: Content, given: _Given
) -> Ready:
    """Check what the caller adds, and make the folder; local, on the first rank."""
    ready = Ready()
    try:
        local_path(given.path)
        _check_given(given)
        _check_tensors(dedication, content)
        ready.head = _head(dedication, optimizer, content, given)
        ready.files = dict(given.files)
        for name, data in ready.files.items():
            _check_file(name, data)
        ready.begun = begin(folder, ready.files)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        ready.problem = f"it cannot be written: {_reason(error)}"
    return ready


def _reason(error: Exception) -> str:
    """What to tell of an error beside the path, which `CheckpointError` names."""
    if isinstance(error, CheckpointError):
        return error.reason
    if isinstance(error, OSError):
        return f"{error.strerror or error}; give a path that all ranks can write, with room there"
    return str(error)


def _check_given(given: _Given) -> None:
    if not isinstance(given.timeout, timedelta) or given.timeout <= timedelta():
        raise ValueError(f"timeout must be a positive datetime.timedelta, got {given.timeout!r}")
    if given.step is not None and (type(given.step) is not int or given.step < 0):
        raise ValueError(f"step must be a whole number of at least 0, got {given.step!r}")
    for name, value in (("extra", given.extra), ("files", given.files)):
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ValueError(f"{name} must be a dictionary by text, got {value!r:.100}")


def _check_tensors(dedication: Dedication, content: Content) -> None:
    for entry in content.entries:
        is_meta = isinstance(entry, PlainEntry | ShardedEntry) and entry.value.is_meta
        if is_meta or (isinstance(entry, OwnedEntry) and entry.param.name in dedication.unfilled):
            raise ValueError(f"{entry.name} has no values yet; load or initialise the model first")
        try:
            _ = entry.facts
        except ValueError as error:
            raise ValueError(f"{entry.name}: {error}") from None


def _check_file(name: str, data: object) -> None:
    check_plain(name)
    if name in (MANIFEST_FILE, INDEX_FILE) or name.endswith(".safetensors"):
        raise ValueError(f"the file {name} of yours has the name of one of its own; rename it")
    if not isinstance(data, bytes):
        raise TypeError(f"the file {name} must be given as bytes, not {type(data).__name__}")


def _head(
    dedication: Dedication, optimizer: Muon | None, content: Content, given: _Given
) -> dict[str, Any]:
    """What the manifest says beside files and tensors."""
    facts = None
    if optimizer is not None:
        groups = [plain_group(group) for group in optimizer.param_groups]
        splits = splits_of(dedication.params)
        facts = OptimizerFacts(groups, optimizer.num_steps, content.steps, splits)
    counted = 0 if optimizer is None else optimizer.num_steps
    owner_map = dedication.owner_map
    shards = owner_map.num_owners // owner_map.num_replicas
    head = Manifest(
        step=counted if given.step is None else given.step,
        files={},
        tensors={},
        mesh={"replicate": owner_map.num_replicas, "shard": shards},
        optimizer=facts,
        extra=dict(given.extra),
        module_state=content.module_state,
        versions={name: _version(name) for name in _PACKAGES},
        created=time.time(),
    )
    copied = Manifest.from_json(head.to_json())  # the caller's values may change while it is saved
    return {**vars(copied), "tied": content.tied}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
