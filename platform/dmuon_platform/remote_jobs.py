"""Jobs on a Ray cluster whose storage is not here, seen and steered through its job server."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from dmuon_platform.causes import GUESSES
from dmuon_platform.errors import (
    INTERRUPTED,
    RUNNING,
    GracefulStop,
    NoCluster,
    PlatformError,
    SpecError,
)
from dmuon_platform.run_ending import State
from dmuon_platform.run_folder import NoSuchRun, resume_there
from dmuon_platform.spec.uri import CLEARLY, UNCLEAR, is_unclear, without_credentials
from dmuon_platform.terminal_text import terminal_text

NAME_KEY = "dmuon_name"
"""Of the metadata of a submitted job: the name of its run."""

STORAGE_KEY = "dmuon_storage"
"""The same: where that run lies, as its job says it."""

SIGNALLED = 128
"""Exit codes above are of processes that a signal ended; they also come as negative numbers."""

REFUSALS = frozenset({RUNNING, SpecError.exit_code, NoSuchRun.exit_code})
"""Exit codes of submissions that could not go on with their run, and have left it as it was."""

DIED = "JOB_SUPERVISOR_ACTOR_DIED"

CHATTY = {
    "ray._private.runtime_env.packaging": logging.WARNING,
    "ray._private.runtime_env.working_dir": logging.ERROR,  # warns of what is left out by default
    "ray.dashboard.modules.dashboard_sdk": logging.WARNING,
    "ray.dashboard.modules.job.sdk": logging.WARNING,
}
"""Modules of Ray that tell every step of an upload, where one line of ours is enough."""

_LIVELINESS = {JobStatus.RUNNING: 2, JobStatus.PENDING: 1}
"""Higher for one that is still there; ended ones are alike."""

_ENTRYPOINT = "Running entrypoint for job "
"""Begins what Ray prints in a job's place before the job prints anything."""

_RAY_LINE = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+\s+[A-Z]+ \w+\.py:\d+ -- ")
"""Time, level and source line before what Ray itself says."""

LOOK_S = 1.0


class NoJobServer(NoCluster):
    """No Ray job server answers at the address."""


def connect(address: str) -> JobSubmissionClient:
    """Return a client of the job server at ``address``.

    Raises:
        NoJobServer: None answers there.
    """
    if is_unclear(address):
        raise NoJobServer(f"--address {UNCLEAR}; {CLEARLY}")
    shown = without_credentials(address)
    if not address.startswith(("http://", "https://")):  # Ray would look for a Ray Client
        raise NoJobServer(
            f"No Ray job server can be at --address {shown}: its address begins with http://, as "
            "http://HOST:8265."
        )
    try:
        urlsplit(address).port  # noqa: B018 - reading it checks it
    except ValueError as error:
        raise NoJobServer(
            f"--address {shown} cannot be an address: {error}. Write it as http://HOST:8265."
        ) from error
    for module, level in CHATTY.items():
        logging.getLogger(module).setLevel(level)
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, AuthenticationError) as error:
        raise NoJobServer(
            f"No Ray job server answers at --address {shown} ({without_credentials(str(error))}). "
            "Start one with `ray start --head` (it needs `ray[default]`; the port is 8265 unless "
            "changed), or correct the address. If the cluster uses token authentication, set "
            "RAY_AUTH_MODE and RAY_AUTH_TOKEN as on its head."
        ) from error
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise NoJobServer(
            f"What answers at --address {shown} is not Ray's job server: it tells no version of "
            "Ray under /api/version. Give the address of the dashboard on the cluster's head, "
            "http://HOST:8265 unless its port was changed."
        ) from error


def jobs_of(client: JobSubmissionClient, address: str) -> list[JobDetails]:
    """Return the jobs that the server at ``address`` knows of.

    Raises:
        NoJobServer: It does not say.
    """
    try:
        return client.list_jobs()
    except (OSError, RuntimeError, ValueError, AuthenticationError) as error:
        raise NoJobServer(
            f"The job server at {address} does not list its jobs "
            f"({without_credentials(str(error))}). See the log of its "
            "dashboard on the head, or correct the address."
        ) from error


def follow_output(client: JobSubmissionClient, submission: str, address: str) -> bool:
    """Print a job's output until it ends; return False when Ctrl-C ended that sooner."""

    async def show() -> None:
        async for text in client.tail_job_logs(submission):
            print(_shown(text), end="", flush=True)

    try:
        asyncio.run(show())
    except KeyboardInterrupt:
        print(
            "\nNo longer following; the job goes on. To end it: "
            f"dmuon stop {submission} --address {address}"
        )
        return False
    return True


def _shown(output: str) -> str:
    """Return what a job has printed without Ray's guesses at what ended a worker."""
    return terminal_text(GUESSES.sub("", output))


def last_words(output: str) -> str | None:
    """Return the last line of what a job has printed, for people; None where it has not yet."""
    lines = [line for line in terminal_text(output).splitlines() if line.strip()]
    if not lines or lines[-1].startswith(_ENTRYPOINT):
        return None
    return _RAY_LINE.sub("", lines[-1]).strip()


def complaint(output: str) -> str | None:
    """Return on one line why a job has ended, as our command said it last; None if it did not."""
    _, is_there, words = f"\n{terminal_text(output)}".rpartition("\ndmuon: ")
    return " ".join(words.split()) if is_there else last_words(output)


def verdict(
    status: JobStatus, exit_code: int | None, error_type: str | None = None
) -> tuple[State, int]:
    """Return how a job stands and the exit code that says so, both as for a run in a folder.

    Args:
        status: What Ray calls it.
        exit_code: Of its driver; None while that runs, or when Ray lost sight of it.
        error_type: Ray's own name of what failed.
    """
    if status == JobStatus.SUCCEEDED:
        return State.FINISHED, 0
    if status == JobStatus.STOPPED or exit_code in (GracefulStop.exit_code, INTERRUPTED):
        return State.STOPPED, GracefulStop.exit_code
    if status == JobStatus.FAILED:
        return _failure(exit_code, error_type)
    return State.RUNNING, RUNNING


def meant_of(jobs: Sequence[JobDetails]) -> JobDetails:
    """Return which of several submissions of a run is meant: one that runs, else the newest.

    One that was refused says nothing about the run, unless there is no other.
    """
    told = [job for job in jobs if not _is_refused(job)] or jobs
    return max(told, key=lambda job: (_LIVELINESS.get(job.status, 0), job.start_time or 0))


def refused_since(meant: JobDetails, jobs: Sequence[JobDetails]) -> JobDetails | None:
    """Return the newest of the submissions of a run that were refused after ``meant``."""
    since = meant.start_time or 0
    later = [job for job in jobs if _is_refused(job) and (job.start_time or 0) > since]
    return max(later, key=lambda job: job.start_time or 0, default=None)


def _is_refused(job: JobDetails) -> bool:
    return job.status == JobStatus.FAILED and job.driver_exit_code in REFUSALS


def _failure(exit_code: int | None, error_type: str | None) -> tuple[State, int]:
    by_signal = exit_code is not None and not 0 <= exit_code <= SIGNALLED
    if by_signal or (exit_code is None and error_type == DIED):
        return State.INTERRUPTED, GracefulStop.exit_code
    code = PlatformError.exit_code if exit_code in (None, 0, RUNNING) else exit_code
    return State.REFUSED if exit_code in REFUSALS else State.FAILED, code


class RemoteJobs:
    """The jobs of one cluster, found by the name of their run or by their submission id.

    Args:
        address: Of the job server, ``http://host:8265``.

    Raises:
        NoJobServer: None answers there.
    """

    def __init__(self, address: str) -> None:
        self._address = without_credentials(address)
        self._client = connect(address)

    def status(self, name: str, *, as_json: bool) -> int:
        """Print how a job stands; return what a scheduler should know of it."""
        jobs = self._of(name)
        job = meant_of(jobs)
        state, code = verdict(job.status, job.driver_exit_code, job.error_type)
        output = self._client.get_job_logs(job.submission_id)
        later = refused_since(job, jobs)
        if later is not None and job.status.is_terminal() and later.driver_exit_code != RUNNING:
            _, code = verdict(later.status, later.driver_exit_code)  # as another launch would end
        facts: dict[str, Any] = {
            "name": (job.metadata or {}).get(NAME_KEY, name),
            "submission": job.submission_id,
            "state": str(state),
            "exit_code": code,
            "driver_exit_code": job.driver_exit_code,
            "started": None if job.start_time is None else job.start_time / 1000,
            "ended": job.end_time / 1000 if job.end_time else None,
            "problem": complaint(output) if state is State.REFUSED else None,
            "output": last_words(output),
            "refused_since": None if later is None else self._refused(later),
        }
        if as_json:
            print(json.dumps(facts, indent=2))
        else:
            print("\n".join(self._lines(facts, state, job)))
        return code

    def _refused(self, job: JobDetails) -> dict[str, Any]:
        said = complaint(self._client.get_job_logs(job.submission_id))
        return {"submission": job.submission_id, "problem": said}

    def _lines(self, facts: dict[str, Any], state: State, job: JobDetails) -> Iterator[str]:
        yield f"{facts['name']}: {state}, as {job.submission_id} at {self._address}"
        if state in (State.STOPPED, State.INTERRUPTED):
            yield f"to go on     {terminal_text(self._way_on(job))}"
        if state is State.REFUSED:
            yield f"why          {facts['problem'] or 'it has not said why'}"
        else:
            yield f"last output  {facts['output'] or 'none yet'}"
        if later := facts["refused_since"]:
            why = later["problem"] or "it has not said why"
            yield f"note         {later['submission']}, submitted later, was refused: {why}"

    def _way_on(self, job: JobDetails) -> str:
        facts = job.metadata or {}
        name, storage = facts.get(NAME_KEY), facts.get(STORAGE_KEY, "")
        if name is None or not Path(storage).is_absolute():  # known to the cluster alone
            return "submit its job again"
        return resume_there(Path(storage, name), self._address)

    def logs(self, name: str, *, follow: bool) -> int:
        """Print what a job has printed."""
        submission = meant_of(self._of(name)).submission_id
        if follow:
            follow_output(self._client, submission, self._address)
        else:
            print(_shown(self._client.get_job_logs(submission)), end="")
        return 0

    def stop(self, name: str, *, wait: bool) -> int:
        """Ask Ray to stop a job, whose driver then saves a checkpoint and ends."""
        job = meant_of(self._of(name))
        if job.status.is_terminal():
            print(f"{name} is not running: {verdict(job.status, job.driver_exit_code)[0]}.")
            return 0
        self._client.stop_job(job.submission_id)
        print(f"{name} was asked to save a checkpoint and end ({job.submission_id}).", flush=True)
        while wait and not self._client.get_job_status(job.submission_id).is_terminal():
            time.sleep(LOOK_S)
        if wait:
            print(f"{name} has ended.")
        return 0

    def _of(self, name: str) -> list[JobDetails]:
        jobs = [job for job in jobs_of(self._client, self._address) if job.submission_id]
        mine = [j for j in jobs if name in (j.submission_id, (j.metadata or {}).get(NAME_KEY))]
        if mine:
            return mine
        names = sorted({(job.metadata or {}).get(NAME_KEY, job.submission_id) for job in jobs})
        there = f"It has {', '.join(names)}." if names else "It has none at all."
        raise NoSuchRun(
            f"The job server at {self._address} has no job of a run {name!r}. {there} A cluster "
            "that was started anew has forgotten its jobs; their runs are still in the storage."
        )
