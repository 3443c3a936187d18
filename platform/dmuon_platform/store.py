"""The checkpoint store of a run: folders that are committed by a rename, or do not count."""

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import dmuon
from dmuon_platform.catalogue import CHECKPOINTS_FOLDER, MANIFESTS_FOLDER, Catalogue, Entry
from dmuon_platform.durable_file import sync, write_whole
from dmuon_platform.errors import SpecError
from dmuon_platform.lease import Lease
from dmuon_platform.line_file import LineFile
from dmuon_platform.look import Look
from dmuon_platform.retention import Candidate, kept
from dmuon_platform.spec.checkpoint import CheckpointSpec

DAMAGED_FILE = "damaged.jsonl"
"""Whole-looking checkpoints whose contents had changed, so that they are never pruned."""

_FOLDER = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"step-\d+\.writing-a(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    path: Path
    manifest: dmuon.Manifest

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step


def _warn(damage: dmuon.DamagedCheckpointError) -> None:
    warnings.warn(f"{damage}. It is left as it is and passed over.", stacklevel=2)


class CheckpointStore:
    """All checkpoints of one run, under ``<run_dir>/checkpoints``.

    A checkpoint is written under another name, its manifest last, and then renamed, so a folder
    is whole or does not count. Nothing that is damaged or half-written is ever reused, nor deleted
    before the same step is committed by a newer attempt.
    What depends on all of them at once goes by their names and by the `Catalogue`, so that a run
    of thousands of checkpoints costs no more than one of a few.

    Attributes:
        verified: The one last found whole or committed, whose contents are known to be good.

    Args:
        run_dir: The folder of the run.
        on_damage: Told of every folder that is passed over, once; by default a warning.
    """

    def __init__(
        self, run_dir: Path, on_damage: Callable[[dmuon.DamagedCheckpointError], None] = _warn
    ) -> None:
        self.run_dir = run_dir
        self.folder = run_dir / CHECKPOINTS_FOLDER
        self._on_damage = on_damage
        self._lease = Lease(run_dir)
        self._named: set[Path] = set()
        self._changed = LineFile(self.folder / DAMAGED_FILE)
        self._catalogue = Catalogue(run_dir)
        self.verified: Checkpoint | None = None

    def acquire_attempt(self) -> int:
        """Take the run over; from now on earlier attempts cannot commit. Returns the number."""
        return self._lease.acquire()

    def begin(self, step: int, attempt: int | None = None) -> Path:
        """Return the folder to write a checkpoint to, which is not there yet.

        Args:
            step: Optimizer steps done.
            attempt: Number of the attempt that saves; None outside of attempts.

        Raises:
            StaleAttempt: A newer attempt has taken the run over.
            OSError: The folder of all checkpoints cannot be written.
        """
        with self._lease.held(attempt):
            pass  # a stale attempt should not even start to write
        folder = self._writing(step, attempt)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _set_aside(folder, "killed")
        return folder

    def commit(self, step: int, attempt: int | None = None) -> Checkpoint:
        """Make what was written a checkpoint; when this returns it survives a crash.

        Args:
            step: As given to `begin`.
            attempt: As given to `begin`.

        Raises:
            StaleAttempt: A newer attempt has taken the run over; nothing is left of it.
            DamagedCheckpointError: Writing it was never finished.
            OSError: It could not be renamed; nothing is left of it.
        """
        folder = self._writing(step, attempt)
        manifest = dmuon.read_manifest(folder)
        final = self.folder / f"step-{step:08d}"
        try:
            with self._lease.held(attempt):
                if final.exists():  # damaged, so an older one was gone on from and came here again
                    _set_aside(final, "replaced")
                folder.rename(final)
        except BaseException:
            self.discard(step, attempt)
            raise
        self._discard_older(step, attempt)
        sync(self.folder)
        saved = Checkpoint(final, manifest)
        self.note_verified(saved)
        self._record(saved)
        return saved

    def discard(self, step: int, attempt: int | None = None) -> None:
        """Delete what was written and not committed; arguments as given to `begin`."""
        shutil.rmtree(self._writing(step, attempt), ignore_errors=True)

    def _discard_older(self, step: int, attempt: int | None) -> None:
        """Delete what stopped attempts have left of a step that is committed now."""
        for path in self.folder.glob(f"step-{step:08d}.writing-a*"):
            unfinished = _UNFINISHED.fullmatch(path.name)
            if unfinished and int(unfinished[1]) < (attempt or 0):
                shutil.rmtree(path, ignore_errors=True)

    def list(self) -> list[Checkpoint]:
        """Return the committed checkpoints, oldest first; sizes are checked, contents are not."""
        return list(self.newest_first())[::-1]

    def newest_first(self) -> Iterator[Checkpoint]:
        """Yield whole checkpoints, and name what is not one; contents are not checked.

        The manifest of each is read when it is asked for.

        Raises:
            SpecError: One of them is of a format that this version does not read.
        """
        for path in sorted(self._folders(), key=_step_of, reverse=True):
            if (found := self._whole(path)) is not None:
                yield found

    def newest_verified(self) -> Checkpoint | None:
        """Return the newest checkpoint whose every byte is as it was written; reads it all."""
        for each in self.newest_first():
            try:
                dmuon.verify_files(each.path, each.manifest)
            except dmuon.DamagedCheckpointError as damage:
                self.note_damaged(each, damage)
            else:
                self.note_verified(each)
                return each
        return None

    def note_verified(self, checkpoint: Checkpoint) -> None:
        """Say that the contents of a checkpoint are known to be good: it is never pruned."""
        self.verified = checkpoint

    def note_damaged(self, checkpoint: Checkpoint, damage: dmuon.DamagedCheckpointError) -> None:
        """Say that the contents of a checkpoint are not what was written: it is never pruned."""
        created = checkpoint.manifest.created
        facts = {"folder": checkpoint.path.name, "created": created, "reason": damage.reason}
        with suppress(OSError):  # a full disk: it is found again, if it is looked at again
            self._changed.append(facts)
        self._name(damage)

    def prune(self, rule: CheckpointSpec) -> None:
        """Delete old checkpoints; never the newest verified, nor anything damaged.

        Reads the manifests of those that stay as the newest or the best, of those it deletes, and
        of those that the catalogue does not know.

        Args:
            rule: Which whole ones stay.
        """
        look = Look(self._whole)
        if self.verified is None or not look.is_good(self.verified.path):
            self.newest_verified()
        paths = tuple(self._folders())
        while True:
            stays = self._stays(paths, rule, look)
            doomed = [found for path in paths if path not in stays and (found := look(path))]
            if not self._correct(look):
                break  # else what the catalogue said was not so, and something else may stay
        changed = {
            (each.content["folder"], each.content["created"]) for each in self._changed.lines()
        }
        for old in doomed:
            is_changed = (old.path.name, old.manifest.created) in changed
            if not is_changed and self._record(old) is not None:
                _delete(old.path)

    def _stays(
        self, paths: Sequence[Path], rule: CheckpointSpec, look: Look[Checkpoint]
    ) -> set[Path]:
        known = self._catalogue.entries()
        for path in paths:
            if path.name not in known and (found := look(path)) is not None:
                self._record(found)
        losses = {path: known[path.name].evaluation_loss for path in paths if path.name in known}
        candidates = [Candidate(path, _step_of(path), losses.get(path)) for path in paths]
        stays = kept(candidates, rule, look.is_good)
        return stays if self.verified is None else stays | {self.verified.path}

    def _correct(self, look: Look[Checkpoint]) -> bool:
        """Let the catalogue say what was just read; return whether it said something else."""
        return any(self._record(each) for each in look.found())

    def _whole(self, path: Path) -> Checkpoint | None:
        try:
            manifest = _manifest_of(path)
            dmuon.verify_files(path, manifest, hashes=False)
        except dmuon.DamagedCheckpointError as damage:
            self._name(damage)
            return None
        return Checkpoint(path, manifest)

    def _writing(self, step: int, attempt: int | None) -> Path:
        return self.folder / f"step-{step:08d}.writing-a{attempt or 0}"

    def _folders(self) -> Iterator[Path]:
        if not self.folder.is_dir():
            return
        with os.scandir(self.folder) as entries:  # knows what is a folder without asking for each
            names = [each.name for each in entries if each.is_dir()]
        for name in names:
            path = self.folder / name
            if _FOLDER.fullmatch(name):
                yield path
            elif unfinished := _UNFINISHED.fullmatch(name):
                attempt = int(unfinished[1])
                if attempt == 0 or attempt < self._lease.newest():  # else it is being written
                    reason = "it was never committed; the attempt that wrote it was stopped"
                    self._name(dmuon.DamagedCheckpointError(path, reason))

    def _name(self, damage: dmuon.DamagedCheckpointError) -> None:
        if damage.path not in self._named:
            self._named.add(damage.path)
            self._on_damage(damage)

    def _record(self, checkpoint: Checkpoint) -> bool | None:
        """Keep what trackers are told: a copy of the manifest, and a line in the catalogue.

        Returns:
            Whether that is new; None when it could not be written, to be tried again.
        """
        entry = Entry.of(checkpoint.path.name, checkpoint.manifest)
        copy = self.run_dir / MANIFESTS_FOLDER / f"{entry.folder}.json"
        try:
            if self._catalogue.entries().get(entry.folder) != entry or not copy.exists():
                _keep(copy, checkpoint.manifest.to_json())
            return self._catalogue.add(entry)  # last: whoever reads the line finds the copy
        except OSError as error:  # the checkpoint itself is good
            warnings.warn(f"trackers are told of {checkpoint.path} later: {error}", stacklevel=2)
            return None


def _keep(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_whole(path, text)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _manifest_of(folder: Path) -> dmuon.Manifest:
    try:
        return dmuon.read_manifest(folder)
    except dmuon.DamagedCheckpointError:
        raise
    except dmuon.CheckpointError as error:  # to pass it over would be to lose its steps
        raise SpecError(
            f"{error}. This run cannot be gone on with by this version of dmuon; give the job a "
            "name of its own (--set name=NAME)."
        ) from error


def _set_aside(path: Path, why: str) -> None:
    """Move a folder out of the way under a name that no checkpoint has."""
    if not path.exists():
        return
    number = 1
    while (aside := path.with_name(f"{path.name}.{why}-{number}")).exists():
        number += 1
    path.rename(aside)


def _delete(folder: Path) -> None:
    """Delete a checkpoint so that it stops being one first, whatever happens meanwhile."""
    doomed = folder.with_name(f"{folder.name}.deleting")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
