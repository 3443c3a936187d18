"""What is checked before any worker starts: the storage, and an earlier run of the same name."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dmuon_platform.catalogue import CHECKPOINTS_FOLDER
from dmuon_platform.causes import FULL_DISK, STORAGE_AWAY
from dmuon_platform.credentials import keep_aside
from dmuon_platform.data import (
    BYTES,
    check_data,
    check_has_tokenizer,
    check_pretrained,
    load_tokenizer,
)
from dmuon_platform.durable_file import write_whole
from dmuon_platform.errors import PlatformError, SpecError
from dmuon_platform.event_facts import whole
from dmuon_platform.events import Journal
from dmuon_platform.model import build_model, check_weights, vocabulary_size, warn_of_length
from dmuon_platform.origin import with_tokenizer_of_model
from dmuon_platform.run_folder import JOB_FILE
from dmuon_platform.spec import JobSpec, load_job
from dmuon_platform.spec.resume import base_folder
from dmuon_platform.store import CheckpointStore


def resolve(spec: JobSpec) -> JobSpec:
    """Return the job with the paths that workers read made absolute: they run in other folders.

    The credentials of its tracking URI are put into the environment, so that no file has them.
    """
    here = Path.cwd()
    model = spec.model
    if model.path is not None:
        model = model.model_copy(update={"path": str(here / model.path)})
    data = spec.data
    if data.tokenizer != BYTES:
        data = data.model_copy(update={"tokenizer": str(here / data.tokenizer)})
    tracking = spec.tracking
    if tracking.uri is not None:
        tracking = tracking.model_copy(update={"uri": keep_aside(tracking.uri)})
    changes = {"model": model, "data": data, "tracking": tracking}
    absolute = spec.model_copy(update=changes).anchored(base_folder())
    return with_tokenizer_of_model(absolute)


def check_job(spec: JobSpec, *, has_text: bool = True, begins: bool = True) -> None:
    """Refuse a model that cannot be built, or data that is not there or does not fit it.

    Warns where samples are longer than a model from elsewhere knows.

    Args:
        spec: The job.
        has_text: Whether its text is to be read; else it was prepared before.
        begins: Whether its weights come from ``model.path``; else from a checkpoint.

    Raises:
        SpecError: What does not fit.
    """
    build_model(spec.model, spec.data.sequence_length, device="meta")
    if spec.model.path is not None:
        folder = Path(spec.model.path)
        if begins:
            check_weights(folder)
            warn_of_length(folder, spec.data.sequence_length)
            if "tokenizer" not in spec.data.model_fields_set:
                check_has_tokenizer(folder)
        name = spec.data.tokenizer
        check_pretrained(name, load_tokenizer(name), folder)
    if has_text:
        check_data(spec.data, vocabulary_size(spec.model), spec.model.path)


def check_storage(spec: JobSpec) -> None:
    """Make the run folder, and that of its checkpoints, and prove that both can be written.

    Raises:
        PlatformError: It cannot.
    """
    for folder in (spec.run_dir, spec.run_dir / CHECKPOINTS_FOLDER):
        probe = folder / f".write-test-{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"dmuon")
            probe.unlink()
        except OSError as error:
            raise _unwritable(folder, error.strerror or str(error)) from error


def _unwritable(folder: Path, why: str) -> PlatformError:
    return PlatformError(
        f"The run folder {folder} cannot be written ({why}). `storage` must be a folder that this "
        "user and all workers can write; change it in the job file or with --set storage=PATH."
    )


def check_from_afar(spec: JobSpec) -> None:
    """Refuse what a launch on another machine will, where it sees the same storage as this one.

    What may not be read here is passed over, and who may write is not looked at: that other launch
    may be another user's.

    Raises:
        PlatformError: The run folder cannot be one.
        SpecError: It holds a run of a job that this one cannot go on with.
    """
    there = next(each for each in (spec.run_dir, *spec.run_dir.parents) if os.path.exists(each))
    if not there.is_dir():
        raise _unwritable(spec.run_dir, os.strerror(errno.ENOTDIR))
    with suppress(PermissionError):
        check_earlier_run(with_tokenizer_of_model(spec))


@contextmanager
def storage_explained(spec: JobSpec) -> Iterator[None]:
    """Say what to do about a disk that fills up in the driver's hands, or does not let it in.

    Raises:
        PlatformError: Instead of an OSError of the storage.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL_DISK:
            raise PlatformError(
                f"The disk of {spec.run_dir} is full ({error.strerror or error}). Make room and "
                "launch the job again: it goes on from the newest checkpoint."
            ) from error
        if not _is_of_storage(error, spec.run_dir.parent):
            raise
        raise PlatformError(
            f"{spec.run_dir} cannot be used ({error.filename}: {error.strerror}). Whoever launches "
            "a job must be able to read and write all that earlier launches have left there. Mend "
            "the storage, or who owns what in it, and launch the job again: it goes on from the "
            "newest checkpoint."
        ) from error


def _is_of_storage(error: OSError, storage: Path) -> bool:
    if not isinstance(error.filename, str):
        return error.errno in STORAGE_AWAY
    return Path(error.filename).is_relative_to(storage)


def check_earlier_run(spec: JobSpec) -> None:
    """Refuse to go on with a run that was started with another job.

    Raises:
        SpecError: The folder holds a run of a job that this one cannot go on with, or that has
            done more steps without having finished.
    """
    recorded = spec.run_dir / JOB_FILE
    if not recorded.exists():
        return
    try:
        earlier = load_job(recorded, [])
    except SpecError as error:
        raise SpecError(
            f"{spec.run_dir} holds an earlier run whose {JOB_FILE} cannot be read any more, so "
            f"this job cannot be compared with it: {error}\nIf you are sure that it is the same "
            f"job, delete {recorded} and launch it again: the run goes on. Else choose another "
            "name."
        ) from error
    differences = spec.differences_that_forbid_resume(earlier)
    if differences:
        lines = "\n".join(f"  {difference}" for difference in differences)
        raise SpecError(
            f"{spec.name!r} was already started in {spec.run_dir} with another job, and cannot go "
            f"on with this one:\n{lines}\nSet these back to go on with that run, or give this job "
            "a name of its own (--set name=NAME)."
        )
    if finished_event(spec) is None:
        _check_steps(spec)


def finished_event(spec: JobSpec) -> dict[str, Any] | None:
    """Return the ``finished`` event of a run that has come to the end of this job, or beyond."""
    finished = Journal(spec.run_dir).last("finished")
    is_enough = finished is not None and (whole(finished, "steps") or 0) >= spec.num_steps
    return finished if is_enough else None


def _check_steps(spec: JobSpec) -> None:
    store = CheckpointStore(spec.run_dir, on_damage=lambda _: None)  # the workers tell of it
    newest = next(store.newest_first(), None)
    if newest is not None and newest.step > spec.num_steps:
        key = "train.tokens" if spec.train.steps is None else "train.steps"
        raise SpecError(
            f"{key} ends the run after step {spec.num_steps}, and {spec.name!r} has done "
            f"{newest.step} ({newest.path}). A run does not go back: end it there, which exports "
            "what it has learnt, or later, or give this job a name of its own (--set name=NAME)."
        )


def record_job(spec: JobSpec) -> list[str]:
    """Leave the resolved job in its run folder, whole or not at all, also after a crash.

    Returns:
        What has changed since the launch before, as ``key: old -> new``.
    """
    file = spec.run_dir / JOB_FILE
    changes = spec.differences(load_job(file, [])) if file.exists() else []
    write_whole(file, spec.to_toml())
    return changes
