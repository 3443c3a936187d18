"""``dmuon status | logs | stop | resume | runs | plot | report``: a run looked at and steered.

Everything here goes by the files under ``storage``, or by the job server of a Ray cluster with
``--address``. Only `resume` and the latter need Ray.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dmuon_platform import matplotlib_cache, run_report
from dmuon_platform.driver_lease import refuse_while_locked
from dmuon_platform.errors import RUNNING, PlatformError
from dmuon_platform.event_facts import clock, number
from dmuon_platform.event_text import event_details, event_text
from dmuon_platform.events import EVENTS_FILE
from dmuon_platform.handover import looked_after
from dmuon_platform.heartbeat import STACKS_FOLDER
from dmuon_platform.line_file import LineFile
from dmuon_platform.run_folder import REPORT_FILE, recorded_job, run_folder, runs_in
from dmuon_platform.run_report import plain, table
from dmuon_platform.run_state import RunState, read_run, sound_driver
from dmuon_platform.spec.user_path import user_path
from dmuon_platform.stop_request import StopFile, StopRequest
from dmuon_platform.tracking_files import TRACKING_FOLDER

LOOK_S = 1.0
"""Seconds between two looks at a run that is followed."""


def status(arguments: argparse.Namespace) -> int:
    """Show how a run stands; return what a scheduler should know of it."""
    if arguments.address is not None:
        from dmuon_platform.remote_jobs import RemoteJobs

        return RemoteJobs(arguments.address).status(arguments.run, as_json=arguments.json)
    folder = run_folder(arguments.run, arguments.storage)
    while True:
        now = time.time()
        run = _with_submission(_read(folder), now)
        print(
            json.dumps(plain(run, now), indent=2) if arguments.json else run_report.report(run, now)
        )
        if not arguments.watch or run.exit_code != RUNNING:
            return run.exit_code
        print(flush=True)
        time.sleep(arguments.every)


def runs(arguments: argparse.Namespace) -> int:
    """Show all runs under ``storage``."""
    storage = user_path(arguments.storage).absolute()
    found = []
    for folder in runs_in(storage):
        try:
            found.append(_read(folder))
        except PlatformError as error:  # the others can be told all the same
            print(f"note: {error}", file=sys.stderr)
    now = time.time()
    if arguments.json:
        print(json.dumps([plain(run, now) for run in found], indent=2))
    elif found:
        print(table(found, now))
    else:
        print(f"No runs in {storage}.")
    return 0


def logs(arguments: argparse.Namespace) -> int:
    """Tell a run's journal in plain lines, with what failed workers said."""
    if arguments.address is not None:
        from dmuon_platform.remote_jobs import RemoteJobs

        return RemoteJobs(arguments.address).logs(arguments.run, follow=arguments.follow)
    folder = run_folder(arguments.run, arguments.storage)
    journal = LineFile(folder / EVENTS_FILE)
    offset = 0
    while True:
        # Asked before the journal is read: what a run that has ended wrote is then all there.
        is_over = not arguments.follow or not _is_running(folder)
        with _readable(folder), warnings.catch_warnings(record=True) as damages:
            warnings.simplefilter("always")
            lines = list(journal.lines(offset))
        for line in lines:
            offset = line.end
            for text in _told(line.content):
                print(text, flush=True)
        for damage in damages:
            print(f"note: {damage.message}", file=sys.stderr)
        if is_over:
            for stacks in sorted((folder / STACKS_FOLDER).glob("*.txt")):
                print(f"Python stacks of a rank that was stuck: {stacks}")
            return 0
        time.sleep(LOOK_S)


def stop(arguments: argparse.Namespace) -> int:
    """Ask a run to save a checkpoint and end; with ``--wait`` return when it has."""
    if arguments.address is not None:
        from dmuon_platform.remote_jobs import RemoteJobs

        return RemoteJobs(arguments.address).stop(arguments.run, wait=arguments.wait)
    folder = run_folder(arguments.run, arguments.storage)
    driver = sound_driver(folder)
    if driver is None or not driver.is_alive(folder):
        return _stop_submission(_with_submission(_read(folder), time.time()), wait=arguments.wait)
    try:
        StopFile(folder).write(StopRequest.now(driver.launch, arguments.reason))
    except OSError as error:
        raise PlatformError(
            f"{folder} cannot be written ({error.strerror or error}), and that is how a run is "
            f"asked to stop. Send SIGTERM to its driver instead: {driver}."
        ) from error
    print(f"{folder.name} was asked to save a checkpoint and end ({driver}).", flush=True)
    while arguments.wait and driver.is_alive(folder):
        time.sleep(LOOK_S)
        driver = sound_driver(folder) or driver
    if arguments.wait:
        print(f"{folder.name} has ended: {_read(folder).state}.")
    return 0


def _stop_submission(run: RunState, *, wait: bool) -> int:
    """Stop what was submitted for a run that does not run, before or while it launches."""
    handover = run.handover
    if handover is None or not handover.is_pending:
        print(f"{run.name} is not running: {run.state}.")
        return 0
    from dmuon_platform.remote_jobs import NoJobServer, RemoteJobs

    again = f"was submitted again as {handover.submission}, of which no launch has begun"
    try:
        jobs = RemoteJobs(handover.address)
    except NoJobServer as error:
        raise NoJobServer(
            f"{run.name} is not running, but {again}, and it cannot be stopped from here: {error} "
            f"`dmuon stop {handover.submission} --address {handover.address}` stops it from where "
            "that job server can be reached."
        ) from error
    print(f"{run.name} is not running ({run.state}), but {again}: that is stopped.", flush=True)
    return jobs.stop(handover.submission, wait=wait)


def resume(arguments: argparse.Namespace) -> int:
    """Launch a run again from the job that it has recorded, here or on a cluster."""
    if arguments.address is not None:
        from dmuon_platform.submission import submit_resume

        return submit_resume(
            arguments.run,
            arguments.storage,
            arguments.set,
            arguments.address,
            follow=arguments.follow,
        )
    folder = run_folder(arguments.run, arguments.storage)
    spec = recorded_job(folder, arguments.set)
    refuse_while_locked(folder)
    from dmuon_platform.launch import run_job

    run_job(spec)
    return 0


def plot(arguments: argparse.Namespace) -> int:
    """Draw a run's pictures, as far as it has come."""
    folder = run_folder(arguments.run, arguments.storage)
    matplotlib_cache.keep_in(folder / TRACKING_FOLDER)
    from dmuon_platform.plots import draw_plots

    try:
        paths = draw_plots(folder, arguments.output)
    except OSError as error:
        raise PlatformError(
            f"The pictures of {folder.name} cannot be written "
            f"({error.strerror or error}). --output names a folder that can be."
        ) from error
    print("\n".join(map(str, paths)) or f"{folder.name} has done no step yet: nothing to draw.")
    return 0


def report(arguments: argparse.Namespace) -> int:
    """Write a run's page, as far as it has come, and say where."""
    folder = run_folder(arguments.run, arguments.storage)
    matplotlib_cache.keep_in(folder / TRACKING_FOLDER)
    try:
        target = arguments.out or folder / REPORT_FILE
        if not target.parent.is_dir():
            raise NotADirectoryError(f"there is no folder {target.parent}")
        if target.is_dir():
            raise IsADirectoryError(f"{target} is a folder")
        from dmuon_platform.report_page import write_report

        print(write_report(folder, target))
    except OSError as error:
        raise PlatformError(
            f"The report of {folder.name} cannot be written: {error}. --out names a file that can "
            "be."
        ) from error
    return 0


def _with_submission(run: RunState, now: float) -> RunState:
    """Return a run with what has become of its newest submission, which counts if it is to come."""
    if run.handover is None:
        return run
    handover = looked_after(run.handover, now)
    exit_code = RUNNING if handover.is_pending else run.exit_code
    return replace(run, handover=handover, exit_code=exit_code)


def _read(folder: Path) -> RunState:
    with _readable(folder):
        return read_run(folder)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PlatformError(
            f"{folder} cannot be read: {error}. Whoever looks at a run must be able to read its "
            "folder; ask its owner, or look at it as the user who runs it."
        ) from error


def _is_running(folder: Path) -> bool:
    driver = sound_driver(folder)
    return driver is not None and driver.is_alive(folder)


def _told(event: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(event.get("kind"), str):
        return
    yield f"{clock(number(event, 'time'))}  {event_text(event)}"
    yield from (f"    {line}" for line in event_details(event))
