"""A job handed to a Ray cluster through its job server."""

import importlib.util
import json
import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.job_submission import JobSubmissionClient

from dmuon_platform.data.sources import PYTHON_STDLIB, find_files
from dmuon_platform.data.tokenizer import BYTES
from dmuon_platform.driver_lease import refuse_while_running
from dmuon_platform.errors import RUNNING, AlreadyRunning, PlatformError, SpecError
from dmuon_platform.git_state import SUBMITTED_VARIABLE, git_state
from dmuon_platform.handover import ADDRESS_KEY, leave_handover, newest_launch
from dmuon_platform.preflight import check_from_afar
from dmuon_platform.remote_jobs import (
    NAME_KEY,
    STORAGE_KEY,
    connect,
    follow_output,
    jobs_of,
    verdict,
)
from dmuon_platform.run_folder import JOB_FILE, recorded_job
from dmuon_platform.spec import JobSpec, load_job
from dmuon_platform.spec.uri import CLEARLY, UNCLEAR, is_unclear, without_credentials
from dmuon_platform.spec.user_path import user_path
from dmuon_platform.uploads import EXCLUDES, find_missing

STOP_WAIT_S = 60
"""Between ``ray job stop`` and SIGKILL; Ray's 3 seconds are too few to save a checkpoint."""

STOP_MARGIN_S = 15
"""What a job needs beyond ``faults.grace_s``, so that the tracker hears of the end too."""

OUR_PACKAGES = ("dmuon", "dmuon_platform")

FROM_A_CLONE = "jobs/train.py"
"""Runs a job where our packages are files and not installed."""

OUR_COMMAND = ("-P", "-m", "dmuon_platform.cli")
"""Runs it where our packages are not in the working folder. A job that uploads none works in the
folder in which the head was started: without ``-P`` a clone there would hide one of the two."""

INSTALLED = "site-packages"
"""Packages below such a folder are taken to be installed on the cluster too."""


def submit_job(job: str, overrides: Sequence[str], address: str, *, follow: bool) -> int:
    """Check a job, upload the current folder, and start it on the cluster.

    From a clone this is ``ray job submit --working-dir . -- python jobs/train.py JOB``.

    Args:
        job: The job file, inside the current folder.
        overrides: Changes to it, each ``section.key=value``.
        address: Of the job server, ``http://host:8265``.
        follow: Whether to print the output until the job ends.

    Returns:
        0 once the job is handed over. When following it, what `dmuon status` says of it then, or 3
        where the job was refused because its run goes on; 0 when Ctrl-C ends the following.

    Raises:
        PlatformError: The job is wrong, also beside an earlier run where its storage is seen from
            here, its run goes on already, or the server does not take it.
    """
    _check_secret(overrides)
    spec = load_job(job, overrides)
    entrypoint = _entrypoint(job, overrides)
    _check_uploaded(job, spec)
    if user_path(spec.storage).is_absolute():  # else it lies somewhere on the cluster
        check_from_afar(spec)
    environment: dict[str, Any] = {"working_dir": str(Path.cwd()), "excludes": EXCLUDES}
    if not _is_clone(Path.cwd()):
        environment |= _our_modules()
    wait_s = max(STOP_WAIT_S, math.ceil(spec.faults.grace_s) + STOP_MARGIN_S)
    submission = _Submission.make(address, spec.name, spec.storage, entrypoint, environment, wait_s)
    if not user_path(spec.storage).is_absolute():
        print(
            f"Its storage {spec.storage!r} lies in the home folder of the cluster's user; "
            "--set storage=/PATH puts it elsewhere.",
            flush=True,
        )
    return submission.follow() if follow else submission.leave()


def submit_resume(
    name: str, storage: str, overrides: Sequence[str], address: str, *, follow: bool
) -> int:
    """Start a run again on a cluster, from the job that it has recorded; nothing is uploaded.

    Args:
        name: Of the run.
        storage: Where it lies, as the cluster sees it.
        overrides: Changes to the job, each ``section.key=value``.
        address: Of the job server.
        follow: As in `submit_job`.

    Returns:
        As `submit_job`.

    Raises:
        PlatformError: The storage is not absolute, the run is seen from here and cannot go on with
            the changes, or the server does not take the job.
    """
    _check_secret(overrides)
    if not Path(storage).is_absolute():
        raise SpecError(
            f"--storage {storage} must be the absolute path at which the cluster sees it, since "
            "the job runs there in another folder; where it sees this machine's files that is "
            f"--storage {shlex.quote(str(Path(storage).resolve()))}"
        )
    folder = Path(storage, name)
    if os.access(folder / JOB_FILE, os.R_OK):
        check_from_afar(recorded_job(folder, overrides))
    command = ["python", *OUR_COMMAND, "resume", name, f"--storage={storage}"]
    entrypoint = shlex.join([*command, *(f"--set={one}" for one in overrides)])
    submission = _Submission.make(address, name, storage, entrypoint, _our_modules())
    return submission.follow() if follow else submission.leave()


@dataclass(frozen=True)
class _Submission:
    """A job that a server has taken."""

    client: JobSubmissionClient
    address: str
    name: str
    id: str

    @classmethod
    def make(
        cls,
        address: str,
        name: str,
        storage: str,
        entrypoint: str,
        environment: Mapping[str, Any],
        stop_wait_s: int = STOP_WAIT_S,
    ) -> "_Submission":
        client = connect(address)
        address = without_credentials(address)
        _refuse_a_second(client, address, name, storage)
        folder = user_path(storage) / name  # if that is absolute, and seen from here
        earlier = newest_launch(folder)
        variables = {
            "RAY_JOB_STOP_WAIT_TIME_S": str(stop_wait_s),
            SUBMITTED_VARIABLE: json.dumps(git_state(Path.cwd())),
        }
        try:
            submission = client.submit_job(
                entrypoint=entrypoint,
                runtime_env={**environment, "env_vars": variables},
                metadata={NAME_KEY: name, STORAGE_KEY: storage, ADDRESS_KEY: address},
            )
        except (RuntimeError, ConnectionError, ValueError) as error:
            raise PlatformError(
                f"The job server at {address} did not take the job: "
                f"{without_credentials(str(error))}"
            ) from error
        if folder.is_absolute():
            leave_handover(folder, submission, address, after=earlier)
        print(f"Submitted {name} as {submission}: {entrypoint}", flush=True)
        return cls(client, address, name, submission)

    def leave(self) -> int:
        print(f"Follow it with: dmuon logs {self.name} --address {self.address} --follow")
        return 0

    def follow(self) -> int:
        if not follow_output(self.client, self.id, self.address):
            return 0
        info = self.client.get_job_info(self.id)
        _, code = verdict(info.status, info.driver_exit_code, info.error_type)
        if code == 0:
            return 0
        first_line, _, _ = (info.message or "").partition("\n")  # the others repeat the output
        reason, _, _ = first_line.partition(", last available logs")
        print(f"{self.id}: {info.status}. {reason}")
        # That the run goes on already is no news to `dmuon status`, but it is to who submits it.
        return RUNNING if info.driver_exit_code == RUNNING else code


def _refuse_a_second(client: JobSubmissionClient, address: str, name: str, storage: str) -> None:
    """Say that a run goes on already, as far as that shows here, before anything is uploaded.

    Raises:
        AlreadyRunning: It does.
    """
    folder = user_path(storage) / name
    if folder.is_absolute():  # else it lies somewhere on the cluster
        refuse_while_running(folder)
    for job in jobs_of(client, address):
        facts = job.metadata or {}
        is_same = facts.get(NAME_KEY) == name and facts.get(STORAGE_KEY, storage) == storage
        if is_same and not job.status.is_terminal():
            raise AlreadyRunning(
                f"{name} is already running at {address}, as {job.submission_id}, so nothing was "
                "submitted: two at a time would write over each other. Wait for it, or end it with "
                f"a checkpoint by `dmuon stop {name} --address {address}`."
            )


def _entrypoint(job: str, overrides: Sequence[str]) -> str:
    here = Path.cwd()
    path = Path(job).resolve()
    if not path.is_relative_to(here):
        raise SpecError(
            f"{job}: lies outside {here}, which is what the cluster gets; change to a folder above "
            "the job file and submit from there"
        )
    start = [FROM_A_CLONE] if _is_clone(here) else [*OUR_COMMAND, "run"]
    command = ["python", *start, path.relative_to(here).as_posix()]
    return shlex.join([*command, *(f"--set={one}" for one in overrides)])


def _check_secret(overrides: Sequence[str]) -> None:
    for one in overrides:
        if is_unclear(one):
            raise SpecError(f"--set {one.partition('=')[0]}: {UNCLEAR}; {CLEARLY}")
        if (shown := without_credentials(one)) != one:
            raise SpecError(
                f"--set {shown}: the cluster would show its password to all who can list jobs. "
                "Write it in the job file, or put MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD into the environment in which the cluster is started"
            )


def _check_uploaded(job: str, spec: JobSpec) -> None:
    source = [spec.data.source] if isinstance(spec.data.source, str) else spec.data.source
    named = {
        "the job": [job],
        "model.path": [] if spec.model.path is None else [spec.model.path],
        "data.tokenizer": [] if spec.data.tokenizer == BYTES else [spec.data.tokenizer],
        "data.source": [] if spec.data.source == PYTHON_STDLIB else source,
    }
    for key, given in named.items():
        relative = [path for path in given if not user_path(path).is_absolute()]
        if key == "data.source":
            _check_each(key, _sources(relative))
            continue
        _check_each(key, map(Path, relative))
        if missing := next((path for path in relative if not Path(path).exists()), None):
            raise SpecError(
                f"{key}: there is no {missing} below {Path.cwd()}, which is what the cluster gets; "
                "correct it, or write the absolute path at which the cluster sees it"
            )


def _sources(patterns: Sequence[str]) -> Sequence[Path]:
    try:
        return find_files(patterns) if patterns else []
    except SpecError:
        _check_each("data.source", map(Path, patterns))  # that it is left out says more
        raise


def _check_each(key: str, paths: Iterable[Path]) -> None:
    here = Path.cwd()
    # Not resolved: a link is uploaded as what it points to, under its own name.
    missing = find_missing([Path(os.path.abspath(path)) for path in paths], here)
    if missing is not None:
        raise SpecError(
            f"{key}: {missing.relative_to(here)} is not uploaded to the cluster, which gets this "
            f"folder without {', '.join(name.strip('/') for name in EXCLUDES)} and what .gitignore "
            "and .rayignore name: write the absolute path at which the cluster sees it, or copy it "
            "to another folder here"
        )


def _is_clone(folder: Path) -> bool:
    """Tell whether the folder brings our packages along, and the program that finds them."""
    return (folder / FROM_A_CLONE).is_file() and all(
        package.is_relative_to(folder) for package in _our_packages()
    )


def _our_packages() -> list[Path]:
    specs = [importlib.util.find_spec(name) for name in OUR_PACKAGES]
    return [Path(spec.origin).parent for spec in specs if spec and spec.origin]


def _our_modules() -> dict[str, Any]:
    """Return what the cluster needs of us, where we are not installed."""
    packages = _our_packages()
    if any(INSTALLED in package.parts for package in packages):
        return {}
    return {"py_modules": [str(package) for package in packages]}
