"""A job handed to a Ray cluster through its job server."""

import asyncio
import importlib.util
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ray.job_submission import JobStatus, JobSubmissionClient

from dmuon_platform.errors import PlatformError, SpecError
from dmuon_platform.spec import JobSpec, load_job

EXCLUDES = [".git", ".venv", "/runs"]
"""What is never uploaded, beside what ``.gitignore`` and ``.rayignore`` name."""

STOP_WAIT_S = 60
"""Between ``ray job stop`` and SIGKILL; Ray's 3 seconds are too few to save a checkpoint."""

OUR_PACKAGES = ("dmuon", "dmuon_platform")

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def submit_job(job: str, overrides: Sequence[str], address: str, *, follow: bool) -> int:
    """Check a job, upload the current folder and our packages, and start it on the cluster.

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
    entrypoint = _entrypoint(job, [*overrides, *_storage_for(spec, address)])
    client = _client(address)
    try:
        submission = client.submit_job(
            entrypoint=entrypoint, runtime_env=_runtime_env(), metadata={"dmuon_name": spec.name}
        )
    except (RuntimeError, ConnectionError, ValueError) as error:
        raise PlatformError(f"The job server at {address} did not take the job: {error}") from error
    print(f"Submitted {spec.name} as {submission}: {entrypoint}", flush=True)
    if not follow:
        print(f"Follow it with: ray job logs --address {address} --follow {submission}")
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
    command = ["python", "-m", "dmuon_platform.cli", "run", path.relative_to(here).as_posix()]
    return shlex.join([*command, *(f"--set={one}" for one in overrides)])


def _storage_for(spec: JobSpec, address: str) -> list[str]:
    """Name ``storage`` in full when the cluster is on this machine: it runs in another folder."""
    host = urlsplit(address if "://" in address else f"http://{address}").hostname
    return [f"storage={spec.anchored(Path.cwd()).storage}"] if host in LOOPBACK else []


def _client(address: str) -> JobSubmissionClient:
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PlatformError(
            f"No Ray job server answers at --address {address} ({error}). Start one with "
            "`ray start --head` (it needs `ray[default]`; the port is 8265 unless changed), or "
            "correct the address. If the cluster uses token authentication, set RAY_AUTH_MODE and "
            "RAY_AUTH_TOKEN as on its head."
        ) from error


def _runtime_env() -> dict[str, Any]:
    specs = [importlib.util.find_spec(name) for name in OUR_PACKAGES]
    folders = [spec.submodule_search_locations for spec in specs if spec is not None]
    return {
        "working_dir": str(Path.cwd()),
        "py_modules": [str(Path(folder[0])) for folder in folders if folder],
        "excludes": EXCLUDES,
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)},
    }


def _follow(client: JobSubmissionClient, submission: str) -> int:
    async def show() -> None:
        async for text in client.tail_job_logs(submission):
            print(text, end="", flush=True)

    try:
        asyncio.run(show())
    except KeyboardInterrupt:
        print(f"\nNo longer following; {submission} goes on. `ray job stop` would end it.")
        return 0
    info = client.get_job_info(submission)
    if info.status == JobStatus.SUCCEEDED:
        return 0
    print(f"{submission}: {info.status}. {info.message or ''}")
    return info.driver_exit_code or PlatformError.exit_code
