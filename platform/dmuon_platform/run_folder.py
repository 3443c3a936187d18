"""Which runs lie under ``storage``, and where the run is that somebody means."""

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from dmuon_platform.catalogue import CHECKPOINTS_FOLDER
from dmuon_platform.errors import PlatformError, SpecError
from dmuon_platform.events import EVENTS_FILE
from dmuon_platform.spec import JobSpec, load_job
from dmuon_platform.spec.user_path import user_path

JOB_FILE = "job.toml"
"""The resolved job inside its run folder: what later launches are compared with."""

DATA_FOLDER = "data"
"""Prepared datasets lie beside the runs, since runs share them."""

PLOTS_FOLDER = "plots"

REPORT_FILE = "report.html"

RAY_FOLDER = "ray"
"""Ray's own folder inside a run: its snapshot, and pointers to our checkpoints."""

JOB_SUFFIXES = frozenset({".toml", ".yaml", ".yml", ".json"})


class NoSuchRun(PlatformError):  # noqa: N818 - names what is the case
    """Nobody has launched a run of that name in that storage."""

    exit_code = 66  # EX_NOINPUT


def run_folder(run: str, storage: str) -> Path:
    """Return the folder of the run that is meant.

    Args:
        run: Its name under ``storage``, or its folder, or a job file, whose own storage counts.
        storage: The folder of all runs.

    Raises:
        NoSuchRun: There is none, with the names of those that are there.
        SpecError: The job file is wrong.
    """
    given = user_path(run)
    folder = user_path(storage).absolute() / run
    if given.suffix in JOB_SUFFIXES and given.is_file():
        folder = load_job(given).run_dir
    elif len(given.parts) > 1 and not is_run(folder):
        folder = given.absolute()
    if is_run(folder):
        return folder
    names = [each.name for each in runs_in(folder.parent)]
    there = f"It has {', '.join(names)}." if names else "It has none at all."
    raise NoSuchRun(
        f"There is no run {folder.name!r} in {folder.parent}. {there} --storage names another "
        "folder of runs; --address http://HOST:8265 asks a cluster whose storage is not here."
    )


def recorded_job(folder: Path, overrides: Sequence[str]) -> JobSpec:
    """Return the job of a run to go on with, in the folder where it lies.

    Raises:
        SpecError: None is recorded, or it cannot be read, or what is changed is wrong.
    """
    if not (folder / JOB_FILE).exists():
        raise SpecError(
            f"{folder} has no {JOB_FILE}: a launch records its job when it has prepared the data, "
            "and none got so far, or the file was lost. Run the job file again."
        )
    try:
        load_job(folder / JOB_FILE)
    except SpecError as error:
        raise SpecError(
            f"{error}\nThat file is what an earlier launch has recorded. `dmuon run` with the job "
            "file that was launched says how to go on without it."
        ) from error
    changes = [*overrides, f"storage={json.dumps(str(folder.parent))}"]  # it may have moved
    return load_job(folder / JOB_FILE, changes)


def default_storage() -> Path:
    """Return where runs lie of which nobody says where."""
    return Path(JobSpec.model_fields["storage"].default)


def words_for(folder: Path) -> str:
    """Return by which words a ``dmuon`` command finds a run from the working folder.

    That is its name, with ``--storage`` unless it lies where the command looks by itself.
    """
    is_there = folder.parent.absolute() == default_storage().absolute()
    where = [] if is_there else [f"--storage={folder.parent.absolute()}"]
    return shlex.join([folder.name, *where])


def resume_there(folder: Path, address: str) -> str:
    """Return the command that goes on with a run on the cluster of a job server.

    Args:
        folder: Of the run, as that cluster sees it.
        address: Of the job server.
    """
    storage = f"--storage={folder.parent}"
    return shlex.join(["dmuon", "resume", folder.name, storage, "--address", address])


def is_run(folder: Path) -> bool:
    """Tell whether a folder is that of a run which was launched at least once.

    A job file alone may be anybody's; a launch makes the folder of checkpoints first.
    """
    # Unlike a Path, os.path says no of a folder that cannot be entered.
    if os.path.isfile(folder / EVENTS_FILE):
        return True
    return os.path.isfile(folder / JOB_FILE) and os.path.isdir(folder / CHECKPOINTS_FOLDER)


def runs_in(storage: Path) -> Iterator[Path]:
    """Yield the folders of all runs, by name."""
    try:
        folders = sorted(storage.iterdir())
    except FileNotFoundError:
        folders = []
    except OSError as error:
        raise PlatformError(
            f"{storage} cannot be read ({error.strerror or error}). --storage names the folder of "
            "all runs."
        ) from error
    yield from (folder for folder in folders if is_run(folder))
