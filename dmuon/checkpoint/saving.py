"""Saving a checkpoint: every tensor is written by one rank, the manifest last.

What a rank writes is first copied into its host memory, which is all that training waits for; the
rest may go on beside it. In the background the ranks meet twice, over a CPU group of their own:
when all have written, and when the first has committed. So either all learn that the checkpoint is
good, or all learn what kept it from being so.
"""

import hashlib
import json
import os
import shutil
import threading
import time
import warnings
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
from dmuon.agreement import gather_objects
from dmuon.call_order import Call
from dmuon.checkpoint.assignment import SECTIONS, Assignment, Item, assign
from dmuon.checkpoint.content import Content, Entry, OwnedEntry, PlainEntry, content_of
from dmuon.checkpoint.durable_file import write_file
from dmuon.checkpoint.facts import FileFacts, TensorFacts
from dmuon.checkpoint.file_names import check_plain
from dmuon.checkpoint.gathering import collect
from dmuon.checkpoint.manifest import MANIFEST_FILE, Manifest, OptimizerFacts, write_manifest
from dmuon.checkpoint.plain_json import encode
from dmuon.checkpoint.tensor_file import write_tensors
from dmuon.dedication import Dedication
from dmuon.errors import CheckpointError, SetupError
from dmuon.optimizer import Muon
from dmuon.optimizer_state import plain_group
from dmuon.owner_map import cpu_group

INDEX_FILE = "model.safetensors.index.json"
_TIMEOUT = timedelta(hours=2)  # for the slowest writer; a dead rank is noticed at once
_PACKAGES = ("dmuon", "torch", "safetensors")
_last: WeakKeyDictionary[Dedication, "SaveHandle"] = WeakKeyDictionary()


class SaveHandle:
    """A save that may still be going on.

    Attributes:
        path: the folder of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_over = threading.Event()
        self._manifest: Manifest | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether the checkpoint is committed, or has failed. Local."""
        return self._is_over.is_set()

    def wait(self) -> Manifest:
        """Wait until the checkpoint is committed; its manifest, equal on all ranks.

        Raises:
            CheckpointError: on every rank, when any could not write; no checkpoint was made.
        """
        self._is_over.wait()
        if self._error is not None:
            raise self._error
        assert self._manifest is not None
        return self._manifest

    def _run(self, work: "_Work") -> None:
        try:
            self._manifest = work.commit()
        except Exception as error:  # kept for `wait`
            self._error = error
        finally:
            self._is_over.set()

    def _run_beside(self, work: "_Work") -> None:
        self._run(work)
        if self._error is not None:
            warnings.warn(f"no checkpoint was made: {self._error}", stacklevel=1)


def save_checkpoint(  # noqa: PLR0913 - the public signature
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Muon | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    async_save: bool = False,
) -> SaveHandle:
    """Write a checkpoint that any mesh can load and ``transformers`` can open. Collective.

    Each rank writes whole tensors: owners their matrices and momentum, the others are shared out
    by size; no rank ever holds the whole model. The folder is a checkpoint when its manifest is
    there, which is written last.

    Args:
        path: a folder that does not exist yet or is empty, on storage that all ranks share.
        model: as given to ``dedicate_params``.
        optimizer: its ``dmuon.Muon``; None saves weights alone.
        step: optimizer steps done; by default what the optimizer has counted.
        extra: plain data of yours for the manifest (that of the first rank counts).
        files: small files of yours by name, such as ``config.json`` (of the first rank).
        async_save: return when the values are copied to host memory, and write beside what
            follows. Call ``wait()`` before the process ends. The next save of this model waits
            for this one, and raises what went wrong with it.

    Returns:
        A handle; without ``async_save`` it is done.

    Raises:
        CheckpointError: on every rank: the folder is in use, a rank could not write, ...; nothing
            that was there before is changed.
    """
    dedication = dedications.of(model)
    if optimizer is not None and optimizer.dedication is not dedication:
        raise SetupError("this optimizer is not the dmuon.Muon that was built for this model")
    dedication.settle_for(Call.SAVE_CHECKPOINT)
    previous = _last.pop(dedication, None)
    if previous is not None:
        previous.wait()
    folder = Path(path)
    work = _prepare(folder, dedication, optimizer, _Given(step, extra or {}, files or {}))
    handle = SaveHandle(folder)
    _last[dedication] = handle
    if async_save:
        name = f"dmuon checkpoint {folder.name}"
        threading.Thread(target=handle._run_beside, args=(work,), name=name).start()
    else:
        handle._run(work)
        del _last[dedication]
        handle.wait()
    return handle


@dataclass(frozen=True)
class _Given:
    """What the caller adds."""

    step: int | None
    extra: Mapping[str, Any]
    files: Mapping[str, bytes]


@torch.no_grad()
def _prepare(
    folder: Path, dedication: Dedication, optimizer: Muon | None, given: _Given
) -> "_Work":
    """Everything that training has to wait for. Collective over the mesh."""
    started = () if optimizer is None else optimizer.state
    mine = [param.name for param in dedication.params if param.param in started]
    have_momentum = frozenset(n for names in gather_objects(dedication, mine) for n in names)
    content = content_of(dedication, optimizer, have_momentum)
    is_first = dedication.owner_map.everyone.rank() == 0
    _agree(folder, dedication, content)
    problem = _folder_problem(folder, given) if is_first else None
    if problem := next(filter(None, gather_objects(dedication, problem)), None):
        raise CheckpointError(folder, problem)
    items = [_item(entry, dedication) for entry in content.entries]
    assignment = assign(items, dedication.owner_map.num_owners)
    writer_of = {
        entry.key: assignment.writer(entry.section, entry.name) for entry in content.entries
    }
    collected = collect(dedication, optimizer, content.entries, writer_of)
    group = dedication.owner_map.everyone
    background = cpu_group("checkpoint", group, _TIMEOUT) if group.size() > 1 else None
    head = _head(dedication, optimizer, content, given)
    return _Work(folder, content.entries, assignment, collected, background, head, given.files)


def _item(entry: Entry, dedication: Dedication) -> Item:
    owner = None
    if isinstance(entry, OwnedEntry):
        owner = dedication.owner_map.place_of(entry.parcel.owner)
    elif isinstance(entry, PlainEntry):
        owner = 0  # ranks may differ, as running statistics do; state dicts take the first too
    return Item(entry.name, entry.section, entry.num_bytes, owner)


def _agree(folder: Path, dedication: Dedication, content: Content) -> None:
    lines = [f"{e.key} {tuple(e.shape)} {e.dtype} {type(e).__name__}" for e in content.entries]
    lines += [str(folder), *map(str, content.tied.items())]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests = gather_objects(dedication, digest)
    if different := [rank for rank, each in enumerate(digests) if each != digests[0]]:
        raise CheckpointError(
            folder,
            f"ranks {different} of the mesh would write other tensors, or to another path, than "
            "rank 0; all ranks must pass the same path and have the same model",
        )


def _folder_problem(folder: Path, given: _Given) -> str | None:
    """Make the folder; local, on the first rank."""
    try:
        encode(dict(given.extra), "extra")
        for name, data in given.files.items():
            _check_file(name, data)
        folder.mkdir(parents=True, exist_ok=True)
        is_used = any(folder.iterdir())
    except (OSError, TypeError, ValueError) as error:
        return f"it cannot be written: {error}"
    return "it is not empty; nothing is overwritten, give another path" if is_used else None


def _check_file(name: str, data: object) -> None:
    check_plain(name)
    if name in (MANIFEST_FILE, INDEX_FILE) or name.endswith(".safetensors"):
        raise ValueError(f"the file {name} of yours has the name of one of its own")
    if not isinstance(data, bytes):
        raise TypeError(f"the file {name} must be given as bytes, not {type(data).__name__}")


def _head(
    dedication: Dedication, optimizer: Muon | None, content: Content, given: _Given
) -> dict[str, Any]:
    """What the manifest says beside files and tensors."""
    facts = None
    if optimizer is not None:
        groups = [plain_group(group) for group in optimizer.param_groups]
        facts = OptimizerFacts(groups, optimizer.num_steps, content.steps)
    counted = 0 if optimizer is None else optimizer.num_steps
    owner_map = dedication.owner_map
    shards = owner_map.num_owners // owner_map.num_replicas
    return {
        "step": counted if given.step is None else given.step,
        "mesh": {"replicate": owner_map.num_replicas, "shard": shards},
        "tied": content.tied,
        "optimizer": facts,
        "extra": dict(given.extra),
        "versions": {name: _version(name) for name in _PACKAGES},
        "created": time.time(),
    }


@dataclass
class _Work:
    """All that is left to do when the values are in host memory."""

    folder: Path
    entries: list[Entry]
    assignment: Assignment
    collected: dict[str, torch.Tensor]
    group: dist.ProcessGroup | None
    head: dict[str, Any]
    files: Mapping[str, bytes]

    def commit(self) -> Manifest:
        """Write this rank's files; on the first rank then the manifest. Collective over the group.

        Raises:
            CheckpointError: on every rank, with what kept any of them from writing.
        """
        me = 0 if self.group is None else self.group.rank()
        written, failure = self._attempt(self._write_mine, me)
        everyones = self._gather((written, failure))
        failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(everyones) if text]
        manifest: Manifest | None = None
        if me == 0 and not failures:
            files = {name: facts for part, _ in everyones for name, facts in part.items()}
            manifest, failure = self._attempt(self._write_manifest, files)
            failures = [failure] if failure else []
        if me == 0 and failures:
            shutil.rmtree(self.folder, ignore_errors=True)  # made for this, and no checkpoint
        manifest, failures = self._from_first((manifest, failures))
        if failures:
            raise CheckpointError(self.folder, f"it could not be written: {'; '.join(failures)}")
        assert manifest is not None
        return manifest

    def _attempt(self, do: Any, *args: Any) -> tuple[Any, str | None]:
        try:
            return do(*args), None
        except Exception as error:  # whatever it is, the other ranks must hear of it
            return {}, f"{type(error).__name__}: {error}"

    def _write_mine(self, me: int) -> dict[str, FileFacts]:
        written: dict[str, FileFacts] = {}
        facts: dict[str, TensorFacts] = {entry.key: entry.facts for entry in self.entries}
        for section in SECTIONS:
            names = self.assignment.names_of(section, me)
            if not names:
                continue
            file = self.assignment.files[section, me]
            mine = {name: facts[f"{section} {name}"] for name in names}

            def fetch(name: str, section: str = section) -> torch.Tensor:
                return self.collected.pop(f"{section} {name}")

            written[file] = write_tensors(self.folder / file, mine, fetch)
        return written

    def _write_manifest(self, files: dict[str, FileFacts]) -> Manifest:
        tensors: dict[str, dict[str, TensorFacts]] = {}
        for entry in self.entries:
            file = self.assignment.file(entry.section, entry.name)
            tensors.setdefault(file, {})[entry.name] = entry.facts
        for name, data in self.files.items():
            files[name] = write_file(self.folder / name, data)
        if index := self._index():
            files[INDEX_FILE] = write_file(self.folder / INDEX_FILE, index)
        manifest = Manifest(files=files, tensors=tensors, **self.head)
        write_manifest(self.folder, manifest)
        return manifest

    def _index(self) -> bytes | None:
        """What tells ``transformers`` which of several files holds what."""
        model = [entry for entry in self.entries if entry.section == "model"]
        weight_map = {entry.name: self.assignment.file("model", entry.name) for entry in model}
        if len(set(weight_map.values())) < 2:
            return None
        total = sum(entry.num_bytes for entry in model)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()

    def _gather(self, mine: tuple[Any, str | None]) -> list[tuple[Any, str | None]]:
        if self.group is None:
            return [mine]
        everyones: list[Any] = [None] * self.group.size()
        dist.all_gather_object(everyones, mine, group=self.group)
        return everyones

    def _from_first(self, mine: tuple[Any, Any]) -> tuple[Any, Any]:
        if self.group is None:
            return mine
        box: list[Any] = [mine]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
