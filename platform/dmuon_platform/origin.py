"""What a run was started from, kept in its folder, so that it goes on when the original is gone.

Weights are no part of it: they are in the checkpoints. The prepared text lies beside the runs.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from dmuon_platform.data import (
    BYTES,
    DatasetInfo,
    dataset_of,
    files_beside,
    find_files,
    load_tokenizer,
    tokenizer_files,
)
from dmuon_platform.data.tokenizer import TOKENIZER_FILE
from dmuon_platform.errors import FatalError, SpecError
from dmuon_platform.model import has_weights
from dmuon_platform.run_folder import JOB_FILE
from dmuon_platform.spec import JobSpec, load_job
from dmuon_platform.store import Checkpoint, CheckpointStore

ORIGIN_FOLDER = "origin"
MODEL_FOLDER = "model"
"""In it: all but the weights of the folder ``model.path``. Beside it lie the files of
``data.tokenizer``."""

CONFIG = "config.json"
GENERATION = "generation_config.json"

_KINDS = frozenset({".json", ".jinja", ".model", ".txt"})
_MOST_BYTES = 256 * 2**20
"""Of one file; a vocabulary has some."""


@dataclass(frozen=True)
class Start:
    """What a launch goes by.

    Attributes:
        spec: The job, with kept files in the place of those that are gone.
        dataset: That of the run; None when its text is there to be read.
        begins: Whether there is no checkpoint to go on from.
    """

    spec: JobSpec
    dataset: DatasetInfo | None = None
    begins: bool = False


def keep_origin(spec: JobSpec) -> None:
    """Copy what a model or a tokenizer from elsewhere is known by; once for a run.

    Raises:
        OSError: It cannot be written.
    """
    folder = spec.run_dir / ORIGIN_FOLDER
    if folder.exists() or (spec.model.path is None and spec.data.tokenizer == BYTES):
        return
    fresh = spec.run_dir / f".{ORIGIN_FOLDER}-{os.getpid()}"
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        (fresh / MODEL_FOLDER).mkdir(parents=True)
        for file in Path(spec.model.path).iterdir() if spec.model.path else ():
            is_wanted = file.suffix in _KINDS and not file.name.endswith(".index.json")
            if is_wanted and file.is_file() and file.stat().st_size <= _MOST_BYTES:
                shutil.copyfile(file, fresh / MODEL_FOLDER / file.name)
        if spec.data.tokenizer != BYTES:
            shutil.copyfile(spec.data.tokenizer, fresh / TOKENIZER_FILE)
            for file in files_beside(spec.data.tokenizer):
                shutil.copyfile(file, fresh / file.name)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def handed_on(spec: JobSpec) -> dict[str, bytes]:
    """Return the files by name that checkpoints and the export have as the run was given them.

    They are those of the tokenizer, and how the model in ``model.path`` generates. Where nothing
    was given, the tokenizer's are made.
    """
    given = files_beside(spec.data.tokenizer)
    if spec.model.path is not None:
        given += [file for file in [Path(spec.model.path, GENERATION)] if file.is_file()]
    made = tokenizer_files(load_tokenizer(spec.data.tokenizer))
    return made | {file.name: file.read_bytes() for file in given}


def with_tokenizer_of_model(spec: JobSpec) -> JobSpec:
    """Return the job with the tokenizer that was in the folder of its model at the first launch.

    A job that names none means that one, also when the folder is gone.
    """
    model, data = spec.model, spec.data
    if model.path is None or "tokenizer" in data.model_fields_set:
        return spec
    file = Path(model.path, TOKENIZER_FILE)
    if not _has_gone(file, spec.run_dir / ORIGIN_FOLDER / TOKENIZER_FILE):
        return spec
    return spec.model_copy(update={"data": data.model_copy(update={"tokenizer": str(file)})})


def start_of(spec: JobSpec, cache_dir: Path) -> Start:
    """Return what to go by: the job as it is, where all that it names is there.

    What is kept stands in for what the run was started from, not for another that is not there.

    Args:
        spec: The job, its paths absolute.
        cache_dir: Where prepared text lies.
    """
    store = CheckpointStore(spec.run_dir, on_damage=lambda _: None)  # the workers tell of it
    newest = next(store.newest_first(), None)
    if newest is None:
        return Start(spec, begins=True)  # nothing to go on with, so all must be there
    origin = spec.run_dir / ORIGIN_FOLDER
    model, data, others = spec.model, spec.data, _changed_keys(spec)
    kept_model, kept_tokenizer = origin / MODEL_FOLDER, origin / TOKENIZER_FILE
    is_its_model = model.path is not None and "model.path" not in others
    if is_its_model and _has_gone(Path(model.path or "", CONFIG), kept_model / CONFIG):
        model = model.model_copy(update={"path": str(kept_model)})
    is_its_tokenizer = data.tokenizer != BYTES and "data.tokenizer" not in others
    if is_its_tokenizer and _has_gone(Path(data.tokenizer), kept_tokenizer):
        data = data.model_copy(update={"tokenizer": str(kept_tokenizer)})
    is_its_text = "data.source" not in others
    dataset = _dataset_without_text(spec, newest, cache_dir) if is_its_text else None
    return Start(spec.model_copy(update={"model": model, "data": data}), dataset)


def _changed_keys(spec: JobSpec) -> set[str]:
    """Return the keys that make this another job than that of the run, as far as it is known."""
    try:
        earlier = load_job(spec.run_dir / JOB_FILE)
    except SpecError:
        return set()
    return {each.partition(":")[0] for each in spec.differences_that_forbid_resume(earlier)}


def _has_gone(file: Path, kept: Path) -> bool:
    return kept.is_file() and not file.is_file()


def _dataset_without_text(spec: JobSpec, newest: Checkpoint, cache_dir: Path) -> DatasetInfo | None:
    try:
        find_files(spec.data.source)
    except SpecError:
        return dataset_of(str(newest.manifest.extra.get("dataset_digest")), cache_dir)
    return None


def check_restored(spec: JobSpec, step: int) -> None:
    """Refuse to begin anew without the weights that the run began with.

    Raises:
        FatalError: No checkpoint could be gone on from, and ``model.path`` or its weights are gone.
    """
    if step == 0 and spec.model.path is not None and not has_weights(Path(spec.model.path)):
        raise FatalError(
            f"No whole checkpoint is left in {spec.run_dir}, and the folder that model.path names "
            "in its job.toml is gone, or its weights are, so there are no weights to begin with. "
            "Put one of them back."
        )
