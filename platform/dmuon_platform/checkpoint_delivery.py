"""Committed checkpoints told to a tracker: what they are at once, their files after all else."""

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from dmuon_platform.catalogue import CHECKPOINTS_FOLDER, MANIFESTS_FOLDER, Catalogue, Entry
from dmuon_platform.spool import Record
from dmuon_platform.tracked_run import TrackedRun
from dmuon_platform.tracking_files import Delivered

MEGABYTES = "checkpoint/megabytes"
"""The curve whose points are the steps with a checkpoint."""
ARTIFACT_FOLDER = "checkpoints"
OPTIMIZER = "optim-"
"""How the names of the files begin that ``"weights"`` leaves out."""
MAX_CHECKPOINTS = 100
"""Told in one go, before it is written down how far the tracker has been told."""

_log = logging.getLogger("dmuon_platform.drain")


class CheckpointCurve:
    """The catalogue as a curve: the size of each checkpoint at its step."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def read_from(self, offset: int, max_records: int | None = None) -> tuple[list[Record], int]:
        """Return the points behind ``offset`` and the offset to go on from."""
        entries, end = self._catalogue.read_from(offset, max_records)
        return [Record(e.step, {MEGABYTES: e.num_bytes / 1e6}, e.created) for e in entries], end

    def size(self) -> int:
        """Return the bytes on disk: no point lies behind that offset now."""
        return self._catalogue.size()


class CheckpointDelivery:
    """Takes the checkpoints of a run to its tracker, in the order in which they were committed.

    ``checkpoints/step-XXXXXXXX`` of the tracked run gets the manifest, byte for byte, and where
    the checkpoint lies, also when it is deleted by now; then its files, if the job wants them. All
    of it may be told again after an interruption: artifacts are overwritten by the same ones.

    Args:
        run_dir: The folder of the run.
        run: Is told.
        delivered: How far it was told; brought forward.
        told: Called whenever that has changed, to write it down.
        wanted: ``"manifest"``, ``"weights"`` or ``"full"``.
    """

    def __init__(
        self,
        run_dir: Path,
        run: TrackedRun,
        delivered: Delivered,
        told: Callable[[], None],
        wanted: str,
    ) -> None:
        self._run_dir = run_dir.resolve()
        self._run = run
        self._delivered = delivered
        self._told = told
        self._wanted = wanted
        self._catalogue = Catalogue(run_dir)

    def deliver_records(self) -> None:
        """Tell of every checkpoint what and where it is."""
        while True:
            start = self._delivered.recorded
            entries, end = self._catalogue.read_from(start, MAX_CHECKPOINTS)
            if end == start:
                return
            if entries:
                self._record(entries)
            self._delivered.recorded = end
            self._told()

    def deliver_files(self) -> Iterator[None]:
        """Copy what the job wants of each checkpoint; yields whenever other things may be told."""
        while True:
            start = self._delivered.copied
            entries, end = self._catalogue.read_from(start, 1)
            if end == start:
                return
            for entry in entries:
                yield from self._copy(entry)
            self._delivered.copied = end
            self._told()

    def _record(self, entries: Sequence[Entry]) -> None:
        latest = {each.folder: each for each in entries}  # a step may be saved once more
        with tempfile.TemporaryDirectory() as scratch:
            for entry in latest.values():
                self._lay_out(entry, Path(scratch) / entry.folder)
            self._run.log_folder(Path(scratch), ARTIFACT_FOLDER)
        newest = entries[-1]
        self._run.set_tags(
            {
                "checkpoint.newest_step": newest.step,
                "checkpoint.newest_uri": self._folder(newest).as_uri(),
                "checkpoint.newest_sha256": newest.sha256,
            }
        )

    def _lay_out(self, entry: Entry, scratch: Path) -> None:
        scratch.mkdir()
        try:
            shutil.copyfile(self._manifest(entry), scratch / "manifest.json")
        except FileNotFoundError:  # somebody has deleted it
            _log.warning("%s has gone, so it cannot be told", self._manifest(entry))
        place = {"uri": self._folder(entry).as_uri(), **asdict(entry)}
        (scratch / "location.json").write_text(json.dumps(place, indent=1), encoding="utf-8")

    def _copy(self, entry: Entry) -> Iterator[None]:
        if self._wanted == "manifest":
            return
        try:
            text = self._manifest(entry).read_text(encoding="utf-8")
            for name in json.loads(text)["files"]:
                if self._wanted == "full" or not name.startswith(OPTIMIZER):
                    file = self._folder(entry) / name
                    self._run.log_file(file, f"{ARTIFACT_FOLDER}/{entry.folder}")
                    yield
        except FileNotFoundError:
            self._note_missing(entry)

    def _note_missing(self, entry: Entry) -> None:
        _log.warning("%s was pruned before its files were copied", entry.folder)
        if entry.folder not in self._delivered.not_copied:
            self._delivered.not_copied.append(entry.folder)
        names = ", ".join(reversed(self._delivered.not_copied))
        self._run.set_tags({"checkpoint.not_copied": f"pruned before the copy: {names}"})

    def _folder(self, entry: Entry) -> Path:
        return self._run_dir / CHECKPOINTS_FOLDER / entry.folder

    def _manifest(self, entry: Entry) -> Path:
        return self._run_dir / MANIFESTS_FOLDER / f"{entry.folder}.json"
