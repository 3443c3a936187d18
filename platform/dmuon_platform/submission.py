"""A job handed to a Ray cluster through its job server."""

import importlib.util
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.job_submission import JobStatus, JobSubmissionClient

from dmuon_platform.errors import PlatformError, SpecError
from dmuon_platform.remote_jobs import NAME_KEY, connect, follow_output
from dmuon_platform.spec import load_job

EXCLUDES = [".git", ".venv", "/runs"]
"""What is never uploaded, beside what ``.gitignore`` and ``.rayignore`` name."""

STOP_WAIT_S = 60
"""Between ``ray job stop`` and SIGKILL; Ray's 3 seconds are too few to save a checkpoint."""

OUR_PACKAGES = ("dmuon", "dmuon_platform")

FROM_A_CLONE = "jobs/train.py"
"""Runs a job where our packages are files and not installed."""

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
        0, or the job's exit code when following a job that fails.

    Raises:
        PlatformError: The job is wrong, or the server does not take it.
    """
    spec = load_job(job, overrides)
    entrypoint = _entrypoint(job, overrides)
    client = connect(address)
    try:
        submission = client.submit_job(
            entrypoint=entrypoint, runtime_env=_runtime_env(), metadata={NAME_KEY: spec.name}
        )
    except (RuntimeError, ConnectionError, ValueError) as error:
        raise PlatformError(f"The job server at {address} did not take the job: {error}") from error
    print(f"Submitted {spec.name} as {submission}: {entrypoint}", flush=True)
    if not Path(spec.storage).expanduser().is_absolute():
        print(
            f"Its storage {spec.storage!r} lies in the home folder of the cluster's user; "
            "--set storage=/PATH puts it elsewhere.",
            flush=True,
        )
    if not follow:
        print(f"Follow it with: dmuon logs {spec.name} --address {address} --follow")
        return 0
    return _follow(client, submission)


def _entrypoint(job: str, overrides: Sequence[str]) -> str:
    here = Path.cwd()
    path = Path(job).resolve()
    if not path.is_relative_to(here):
        raise SpecError(
            f"{job}: lies outside {here}, which is what the cluster gets; change to a folder above "
            "the job file and submit from there"
        )
    start = [FROM_A_CLONE] if _is_clone(here) else ["-m", "dmuon_platform.cli", "run"]
    command = ["python", *start, path.relative_to(here).as_posix()]
    return shlex.join([*command, *(f"--set={one}" for one in overrides)])


def _is_clone(folder: Path) -> bool:
    """Tell whether the folder brings our packages along, and the program that finds them."""
    return (folder / FROM_A_CLONE).is_file() and all(
        package.is_relative_to(folder) for package in _our_packages()
    )


def _our_packages() -> list[Path]:
    specs = [importlib.util.find_spec(name) for name in OUR_PACKAGES]
    return [Path(spec.origin).parent for spec in specs if spec and spec.origin]


def _runtime_env() -> dict[str, Any]:
    environment: dict[str, Any] = {
        "working_dir": str(Path.cwd()),
        "excludes": EXCLUDES,
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)},
    }
    packages = _our_packages()
    is_installed = any(INSTALLED in package.parts for package in packages)
    if not is_installed and not _is_clone(Path.cwd()):
        environment["py_modules"] = [str(package) for package in packages]
    return environment


def _follow(client: JobSubmissionClient, submission: str) -> int:
    if not follow_output(client, submission):
        return 0
    info = client.get_job_info(submission)
    if info.status == JobStatus.SUCCEEDED:
        return 0
    first_line, _, _ = (info.message or "").partition("\n")  # the others repeat the output
    print(f"{submission}: {info.status}. {first_line}")
    return info.driver_exit_code or PlatformError.exit_code
