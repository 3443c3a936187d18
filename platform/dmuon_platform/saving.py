"""Checkpoints of a training in motion: written by all ranks, committed by rank 0 alone."""

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray.train
from ray.train import Checkpoint as RayCheckpoint
from ray.train import CheckpointUploadMode

import dmuon
from dmuon_platform.errors import Diverged, PlatformError, SpecError
from dmuon_platform.event_facts import whole
from dmuon_platform.events import Journal
from dmuon_platform.export import config_files
from dmuon_platform.heartbeat import Phase
from dmuon_platform.model import hf_config
from dmuon_platform.place import Place
from dmuon_platform.run_folder import RAY_FOLDER
from dmuon_platform.spec import JobSpec
from dmuon_platform.store import Checkpoint, CheckpointStore
from dmuon_platform.training import Training
from dmuon_platform.weights_digest import digest_of_checkpoint


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that is written beside the training and not committed yet."""

    step: int
    handle: dmuon.SaveHandle


@dataclass(frozen=True)
class _Outcome:
    """What rank 0 tells the others of a file operation that may fail and be tried again."""

    path: Path | None = None
    problem: str | None = None


class Saving:
    """Saves and restores one training, and mirrors every checkpoint to Ray.

    One checkpoint at a time is written beside the training. It counts from the moment it is
    committed, which all ranks do together in `settle`.

    Attributes:
        write: Begins to write a checkpoint, as `dmuon.save_checkpoint` does.
        files: That lie in every checkpoint, by name, such as those of the tokenizer.

    Args:
        spec: The job.
        place: Of this rank.
        attempt: Its number.
        facts: That every checkpoint records.
        on_progress: Told that a save comes forward.
        before_commit: Writes the metrics up to a checkpoint, on rank 0. When that raises OSError
            the checkpoint does not count either, so a run that goes on from one lacks no step.
    """

    def __init__(
        self,
        spec: JobSpec,
        place: Place,
        attempt: int,
        facts: Mapping[str, Any],
        on_progress: Callable[[Phase], None] = lambda phase: None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._spec = spec
        self._place = place
        self._attempt = attempt
        self._facts = dict(facts)
        self._on_progress = on_progress
        self._before_commit = before_commit
        self.write: Callable[..., dmuon.SaveHandle] = dmuon.save_checkpoint
        self.files: Mapping[str, bytes] = {}
        self._journal = Journal(spec.run_dir)
        self._store = CheckpointStore(spec.run_dir, self._on_damage)
        self._pending: _Pending | None = None
        self._problem: str | None = None

    @property
    def is_written(self) -> bool:
        """Whether this rank waits for nothing but `settle`. Local."""
        return self._pending is not None and self._pending.handle.done

    @property
    def newest_step(self) -> int | None:
        """Steps done at the newest checkpoint that is whole; None on other ranks than the first."""
        newest = self._store.verified
        return None if newest is None else newest.step

    def restore(self, training: Training) -> int:
        """Load the newest checkpoint that is whole and return its step, 0 without one. Collective.

        Raises:
            SpecError: It was made from another dataset, or is of another format; on rank 0.
            CheckpointError: It does not fit the model; on all ranks.
        """
        candidates = self._store.newest_first()  # nothing is read before rank 0 asks for one
        while True:
            found: list[Checkpoint] = []  # on rank 0 alone
            path = self._place.from_first(
                "find the newest checkpoint", partial(self._next, candidates, found)
            )
            if path is None:
                self._note_loss(0)
                return 0
            try:
                loaded = dmuon.load_checkpoint(
                    path, training.model, training.optimizer, verify_hashes="sha256"
                )
            except dmuon.DamagedCheckpointError as damage:  # on all ranks alike
                for each in found:
                    self._store.note_damaged(each, damage)
            else:
                for each in found:
                    self._store.note_verified(each)
                self._note_loss(loaded.step)
                return loaded.step

    def save(self, training: Training, step: int, metrics: Mapping[str, float]) -> None:
        """Copy the state after ``step`` steps and begin to write it. Collective.

        A failure to write is noted in the journal, and the next save tries again.

        Raises:
            Diverged: A weight is not finite; on all ranks.
            StaleAttempt: A newer attempt has taken the run over; on rank 0.
        """
        self._on_progress(Phase.SAVE)
        self.settle()
        check_finite(step, dmuon.nonfinite_weights(training.model))
        begun = self._place.from_first(
            f"begin the checkpoint of step {step}", lambda: self._begin(step)
        )
        if begun.path is None:
            self._note_failure(step, begun.problem)
            return
        try:
            handle = self.write(
                begun.path,
                training.model,
                training.optimizer,
                step=step,
                extra={"attempt": self._attempt, "metrics": _finite(metrics), **self._facts},
                files={**self._config_files(training), **self.files},
                async_save=True,
            )
        except dmuon.CheckpointError as error:  # on all ranks alike
            self._note_failure(step, str(error))
        else:
            self._pending = _Pending(step, handle)

    def settle(self) -> None:
        """Wait for what is being written, and commit it. Collective; does nothing without it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        step = pending.step
        self._on_progress(Phase.SAVE)
        try:
            pending.handle.wait()
        except dmuon.CheckpointError as error:  # on all ranks alike
            self._note_failure(step, str(error))
            return
        outcome = self._place.from_first(
            f"commit the checkpoint of step {step}", lambda: self._commit(step)
        )
        if outcome.path is None:
            self._note_failure(step, outcome.problem)
            return
        self._problem = None
        self._mirror(step, outcome.path)

    def finish(self) -> None:
        """Commit the last checkpoint. Collective.

        Raises:
            PlatformError: It could not be written; on all ranks.
        """
        self.settle()
        if self._problem is not None:
            raise PlatformError(
                f"{self._problem} The training is done, but its result is not saved. Make room or "
                "mend the storage, and launch the job again: it goes on from the newest checkpoint."
            )

    def weights_digest(self) -> str | None:
        """Return the digest of the newest checkpoint's weights on rank 0, None elsewhere."""
        newest = self._store.verified
        return None if newest is None else digest_of_checkpoint(newest)

    def _next(self, candidates: Iterator[Checkpoint], found: list[Checkpoint]) -> Path | None:
        for each in candidates:
            check_dataset(each, self._facts.get("dataset_digest"))
            found.append(each)
            return each.path
        return None

    def _note_loss(self, step: int) -> None:
        """Tell it when a checkpoint that was made cannot be gone on from. Local."""
        if self._place.is_first:
            saved = whole(self._journal.last("checkpoint_saved"), "step")
            if saved is not None and saved > step:
                self._note("went_back", saved=saved, step=step)

    def _begin(self, step: int) -> _Outcome:
        try:
            return _Outcome(self._store.begin(step, self._attempt))
        except OSError as error:
            return _Outcome(problem=str(error))

    def _commit(self, step: int) -> _Outcome:
        try:
            self._before_commit()
        except OSError as error:
            self._store.discard(step, self._attempt)
            return _Outcome(problem=f"the metrics up to it cannot be written: {error}")
        try:
            saved = self._store.commit(step, self._attempt)
        except (OSError, dmuon.CheckpointError) as error:
            return _Outcome(problem=str(error))
        self._note("checkpoint_saved", step=step)
        try:
            self._store.prune(self._spec.checkpoint)
        except OSError as error:  # the new one is good, and the old ones are in nobody's way
            warnings.warn(f"old checkpoints could not be deleted: {error}", stacklevel=2)
        return _Outcome(saved.path)

    def _note_failure(self, step: int, problem: str | None) -> None:
        self._problem = f"The checkpoint of step {step} could not be saved: {problem}."
        if self._place.is_first:
            self._note("checkpoint_failed", step=step, problem=problem)

    def _config_files(self, training: Training) -> dict[str, bytes]:
        spec, info = self._spec, training.dataset.info
        return config_files(hf_config(spec.model, spec.data.sequence_length, info.separator_id))

    def _on_damage(self, damage: dmuon.DamagedCheckpointError) -> None:
        self._note("checkpoint_damaged", damage=str(damage))

    def _note(self, kind: str, **data: Any) -> None:
        self._journal.note(kind, attempt=self._attempt, **data)  # the disk may be full for it too

    def _mirror(self, step: int, path: Path) -> None:
        """Tell Ray, with a pointer: Ray may then prune what it knows, and never our files."""
        checkpoint = None
        if self._place.is_first:
            folder = self._spec.run_dir / RAY_FOLDER / f"step-{step:08d}-a{self._attempt}"
            with suppress(OSError):  # Ray then knows of one less; we do not ask it
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "pointer.json").write_text(json.dumps({"checkpoint": os.fspath(path)}))
                checkpoint = RayCheckpoint(os.fspath(folder))
        ray.train.report(
            {"step": step}, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD
        )


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return what JSON has numbers for; a step whose update was dropped may have others."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def check_finite(step: int, names: Sequence[str]) -> None:
    """Refuse weights that no training can go on from.

    Args:
        step: Optimizer steps done.
        names: Of the weights that are not finite.

    Raises:
        Diverged: With the first of them.
    """
    if names:
        more = f" (nor are {len(names) - 1} others)" if len(names) > 1 else ""
        raise Diverged(
            f"After step {step} the weight {names[0]} is no longer finite{more}, so no checkpoint "
            "was made of it; the newest one is from before. Lower optimizer.lr or "
            "optimizer.adamw_lr, or lengthen schedule.warmup_steps."
        )


def check_dataset(checkpoint: Checkpoint, digest: str | None) -> None:
    """Refuse to go on with a run on other data than before.

    Args:
        checkpoint: The one to go on from.
        digest: Of the dataset now.

    Raises:
        SpecError: It was made from another dataset.
    """
    before = checkpoint.manifest.extra.get("dataset_digest")
    if before != digest:
        raise SpecError(
            f"{checkpoint.path} was trained on a dataset with the digest {before}, and the dataset "
            f"now has {digest}: the files of data.source, or how they are read, have changed. Put "
            "them back to go on with that run, or give this job a name of its own "
            "(--set name=NAME)."
        )
