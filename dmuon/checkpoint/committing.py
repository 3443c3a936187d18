"""Committing a checkpoint: files are written by all ranks, then the manifest by the first.

It may go on beside training: of the model it looks at what the snapshot holds, and no more.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dmuon.checkpoint.assignment import SECTIONS, Assignment, section_of
from dmuon.checkpoint.content import MODEL, Entry
from dmuon.checkpoint.durable_file import write_file
from dmuon.checkpoint.facts import FileFacts, TensorFacts
from dmuon.checkpoint.gathering import Exchange, Scattered
from dmuon.checkpoint.index_file import INDEX_FILE, index_json
from dmuon.checkpoint.manifest import Manifest, write_manifest
from dmuon.checkpoint.meeting import Meeting
from dmuon.checkpoint.snapshot import Snapshot
from dmuon.checkpoint.tensor_file import write_tensors
from dmuon.checkpoint.unfinished import Begun
from dmuon.checkpoint.verification import verify
from dmuon.errors import CheckpointError, DamagedCheckpointError


@dataclass
class Ready:
    """What the first rank has done before anything is copied.

    Attributes:
        head: what the manifest says beside files and tensors.
        files: those of the caller.
        begun: the folder; None when there is a problem.
        problem: what keeps the checkpoint from being written.
    """

    head: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    begun: Begun | None = None
    problem: str | None = None


@dataclass
class Work:
    """All that is left to do when it is known what to write.

    Attributes:
        folder: of the checkpoint; it is there.
        entries: of the whole checkpoint, equal on all ranks.
        assignment: who writes what.
        snapshot: what this rank has of it; gone when this is done.
        scattered: what the ranks exchange before they write.
        group: where the ranks meet; None for one rank alone.
        ready: what the first rank brings.
        is_beside: training goes on meanwhile, so live tensors are copied first.
        has_lost_group: the group is of no use any more.
    """

    folder: Path
    entries: list[Entry]
    assignment: Assignment
    snapshot: Snapshot
    scattered: list[Scattered]
    group: dist.ProcessGroup | None
    ready: Ready
    is_beside: bool
    has_lost_group: bool = False
    _failure: str | None = None
    _exchange: Exchange | None = None

    def take(self) -> None:
        """Copy what training will change; what goes wrong is told to all in `commit`. Local."""
        take = self.snapshot.take if self.is_beside else self.snapshot.share
        _, self._failure = self._attempt(take)

    def _make_room(self) -> None:
        if self.group is not None:
            self._exchange = Exchange(self.group, self.scattered)

    def commit(self) -> Manifest:
        """After `take`: write this rank's files; on the first rank then the manifest.

        Collective over the group. The ranks meet when all have copied, when all have written, and
        when the first has committed.

        Raises:
            CheckpointError: on every rank, with what kept any of them from writing.
        """
        try:
            manifest, failures = self._commit(Meeting(self.group))
        except RuntimeError as error:
            self.has_lost_group = True
            first_line = str(error).strip().partition("\n")[0]
            raise CheckpointError(
                self.folder,
                "another rank is gone, or took longer than the timeout of the save, so it is not "
                "known to be whole; its manifest, if it has one, tells. The backend says: "
                f"{first_line}",
            ) from error
        finally:
            self.snapshot.values.clear()
            self._exchange = None
            if self.ready.begun is not None:
                self.ready.begun.release()
        if manifest is None:
            raise CheckpointError(self.folder, f"it could not be written: {'; '.join(failures)}")
        return manifest

    def _commit(self, meeting: Meeting) -> tuple[Manifest | None, list[str]]:
        failure = self._failure or self._attempt(self._make_room)[1]
        everyones = meeting.tell_all(({}, failure))
        if not any(text for _, text in everyones):
            if self._exchange is not None:
                self._exchange.run(self.snapshot.values)
                self._exchange = None
            written, failure = self._attempt(self._write_mine, meeting.rank)
            everyones = meeting.tell_all((written, failure))
        failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(everyones) if text]
        manifest: Manifest | None = None
        if meeting.rank == 0:
            if not failures:
                files = {name: facts for part, _ in everyones for name, facts in part.items()}
                manifest, failure = self._attempt(self._write_manifest, files)
                failures = [failure] if failure else []
            if failures:
                manifest = None
                if self.ready.begun is not None:
                    self.ready.begun.undo()
        return meeting.tell_all((manifest, failures))[0]

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
                return self.snapshot.values.pop(f"{section} {name}")

            written[file] = write_tensors(self.folder / file, mine, fetch)
        return written

    def _write_manifest(self, files: dict[str, FileFacts]) -> Manifest:
        tensors: dict[str, dict[str, TensorFacts]] = {}
        for entry in self.entries:
            file = self.assignment.file(entry.section, entry.name)
            tensors.setdefault(file, {})[entry.name] = entry.facts
        for name, data in self.ready.files.items():
            files[name] = write_file(self.folder / name, data)
        weights = {file: held for file, held in tensors.items() if section_of(file) == MODEL}
        if len(weights) > 1:
            files[INDEX_FILE] = write_file(self.folder / INDEX_FILE, index_json(weights))
        manifest = Manifest(**self.ready.head | {"files": files, "tensors": tensors})
        self._check_visible(manifest)
        begun = self.ready.begun
        assert begun is not None
        begun.check()
        write_manifest(self.folder, manifest)
        begun.finish()
        return manifest

    def _check_visible(self, manifest: Manifest) -> None:
        """A rank with other storage under the same path has written where nobody will look."""
        try:
            verify(self.folder, manifest, hashes=False)
        except DamagedCheckpointError as error:
            raise CheckpointError(
                self.folder,
                f"{error.reason} for the first rank, though a rank has written it; all ranks must "
                "share the storage",
            ) from error
