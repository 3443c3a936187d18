"""``dmuon sweep``: run what is not run yet, a few at a time, and show what came of it."""

import argparse
import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dmuon_platform import matplotlib_cache, preflight
from dmuon_platform.data import check_size, find_dataset
from dmuon_platform.data.info import DatasetInfo
from dmuon_platform.driver_lease import DriverLease
from dmuon_platform.durable_file import write_whole
from dmuon_platform.errors import AlreadyRunning, PlatformError
from dmuon_platform.events import Journal
from dmuon_platform.git_state import git_state
from dmuon_platform.metric_names import BITS_PER_BYTE
from dmuon_platform.ray_session import RaySession
from dmuon_platform.run_folder import DATA_FOLDER
from dmuon_platform.spec import JobSpec, load_job
from dmuon_platform.spec.data import DataSpec
from dmuon_platform.sweep.grid import Grid, Point, make_points
from dmuon_platform.sweep.outcome import (
    Outcome,
    best_of,
    edges_of,
    length_of,
    outcome_of,
    plain,
    rows_of,
    table,
)
from dmuon_platform.sweep.point import end_with, train_point
from dmuon_platform.tracking import DATABASE, DRAIN_ENVIRONMENT, delivery, describe
from dmuon_platform.tracking_files import TrackingFiles

RESULT_FILE, TABLE_FILE, PICTURE_FILE = "sweep.json", "sweep.txt", "sweep.png"

Datasets = Mapping[DataSpec, DatasetInfo]


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return 0.

    Raises:
        SpecError: The job or a grid is wrong; nothing was started.
        PlatformError: A training failed otherwise than by diverging.
    """
    job = preflight.resolve(load_job(arguments.job, arguments.set))
    folder = arguments.output or job.run_dir.parent / f"{job.name}-sweep"
    grids = [Grid.parse(assignments) for assignments in arguments.grid]
    uri = job.tracking.uri or f"sqlite:///{job.run_dir.parent / DATABASE}"
    overrides = [*arguments.set, f"tracking.uri={uri}"]
    points = make_points(arguments.job, overrides, grids, arguments.seeds, folder.absolute())
    for point in points:
        preflight.check_earlier_run(point.spec)
    for spec in {(each.spec.model, each.spec.data): each.spec for each in points}.values():
        preflight.check_job(spec)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlatformError(
            f"The folder of the sweep, {folder}, cannot be made ({error.strerror or error}). "
            "--output names one that can."
        ) from error
    with _alone_in(folder):
        texts = dict.fromkeys(point.spec.data for point in points)
        datasets = {data: _dataset(job, data) for data in texts}
        for point in points:
            check_size(datasets[point.spec.data], point.spec.train.global_batch_size)
        outcomes = _outcomes(points, datasets, arguments.parallel)
        _conclude(job, outcomes, grids, folder)
    return 0


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Have the folder of the sweep for this command.

    Raises:
        AlreadyRunning: Another one has it.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(DriverLease(folder, None, None))
        except AlreadyRunning as error:
            raise AlreadyRunning(
                f"Another dmuon sweep is at work in {folder}: wait for it, end it, or give this "
                "one another --output."
            ) from error
        yield


def _dataset(job: JobSpec, data: DataSpec) -> DatasetInfo:
    """Return a prepared text, which runs share; made with a Ray of its own if need be."""
    folder = job.run_dir.parent / DATA_FOLDER
    found = find_dataset(data, folder)
    if found is not None:
        return found
    with RaySession(job.model_copy(update={"data": data})) as session:
        return session.prepare(folder)


def _outcomes(points: Sequence[Point], datasets: Datasets, parallel: int) -> list[Outcome]:
    """Return what came of each point, in their order, after running those that are left."""
    left = [point for point in points if outcome_of(point) is None]
    print(f"{len(points)} trainings, {len(points) - len(left)} of them done before", flush=True)
    for point in (point for point in points if point not in left):
        _track(point, datasets[point.spec.data])
    for count, point in enumerate(_trained(left, datasets, parallel), 1):
        outcome = outcome_of(point)
        if outcome is None:
            raise PlatformError(f"{point.spec.run_dir} does not say what came of its training")
        shown = "diverged"
        if outcome.evaluation is not None:
            shown = f"{outcome.evaluation[BITS_PER_BYTE]:.4f} bits a byte"
        print(
            f"{count}/{len(left)} {point.spec.name}: {shown}, {outcome.seconds:.0f} s", flush=True
        )
        _track(point, datasets[point.spec.data])
    outcomes = [outcome_of(point) for point in points]
    return [outcome for outcome in outcomes if outcome is not None]


def _trained(points: Sequence[Point], datasets: Datasets, parallel: int) -> Iterator[Point]:
    """Train, each point in a new process, and yield those that are at their end.

    Raises:
        PlatformError: One failed. Those under way are finished first, and count, unless the
            process of one was killed, which ends them all.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        parallel, spawn, initializer=end_with, initargs=(os.getpid(),), max_tasks_per_child=1
    ) as pool:
        running = {
            pool.submit(
                train_point, point.spec.model_dump(mode="json"), datasets[point.spec.data].folder
            ): point
            for point in points
        }
        try:
            for future in as_completed(running):
                point = running[future]
                try:
                    future.result()
                except BrokenProcessPool as error:  # of all that are left, whichever it was
                    raise PlatformError(
                        f"the process of a training was killed: one of {_under_way(points)}. Look "
                        "for what kills it, such as a lack of memory; with a smaller --parallel "
                        "less is needed at a time. The same command runs what is left again."
                    ) from error
                except Exception as error:
                    raise PlatformError(
                        f"the training {point.spec.name} failed: {type(error).__name__}: {error}. "
                        "The same command runs it, and what is left, again."
                    ) from error
                yield point
        finally:
            pool.shutdown(cancel_futures=True)


def _under_way(points: Sequence[Point]) -> str:
    begun = [p for p in points if Journal(p.spec.run_dir).last("launched") and not outcome_of(p)]
    return ", ".join(point.spec.name for point in begun or points)


def _track(point: Point, info: DatasetInfo) -> None:
    """Tell MLflow about a training, now or when the command is run again."""
    if delivery(point.spec.run_dir).is_complete:
        return
    for key, value in DRAIN_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    matplotlib_cache.keep_in(point.spec.run_dir.parent)
    from dmuon_platform.drain import Drain  # imports mlflow and matplotlib, which read those

    files = TrackingFiles(point.spec.run_dir)
    facts = {"git": git_state(Path.cwd()), "dataset": {"name": str(point.spec.data.source)}}
    facts["dataset"] |= vars(info)
    facts["sweep"] = {"folder": point.spec.run_dir.parent.name, **point.settings}
    files.describe(describe(point.spec, facts, files.run_key()))
    files.want("FINISHED", int(time.time() * 1000))
    Drain(point.spec.run_dir).deliver()
    told = delivery(point.spec.run_dir)
    if not told.is_complete:
        name = point.spec.name
        warnings.warn(f"MLflow does not know all of {name} yet: {told.problem}", stacklevel=2)


def _conclude(job: JobSpec, outcomes: list[Outcome], grids: list[Grid], folder: Path) -> None:
    """Write table, picture and data, and say what is best."""
    rows = rows_of(outcomes)
    text = table(rows, grids)
    title = f"{job.name}: {length_of(outcomes)}"
    write_whole(folder / RESULT_FILE, json.dumps(plain(outcomes, grids), indent=2) + "\n")
    write_whole(folder / TABLE_FILE, f"{title}\n\n{text}\n")
    matplotlib_cache.keep_in(folder)
    from dmuon_platform.sweep.picture import draw_sweep  # imports matplotlib, which reads that

    draw_sweep(title, rows, grids, folder / PICTURE_FILE)
    print(f"\n{title}\n\n{text}\n")
    for number, grid in enumerate(grids):
        best = best_of(rows, number)
        if best is None:
            print(f"Every setting of {grid.label} diverged.")
            continue
        for key in edges_of(best, grid):
            print(
                f"The best {key} of {grid.label} is {best.settings[key]}, at the edge of what was "
                "tried: give --grid more values there."
            )
    print(f"{folder} has {RESULT_FILE}, {TABLE_FILE} and {PICTURE_FILE}.")
