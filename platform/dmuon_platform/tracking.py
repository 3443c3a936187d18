"""MLflow as the driver sees it: a process of its own that follows the run's files."""

import json
import subprocess
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dmuon_platform import matplotlib_cache
from dmuon_platform.child_process import command_of, environment
from dmuon_platform.errors import SUBMIT_AGAIN, exit_code_of, problem_of
from dmuon_platform.spec import JobSpec
from dmuon_platform.spec.toml import NONE, toml_value
from dmuon_platform.tracking_files import Description, TrackingFiles

DATABASE = "mlflow.db"
ARTIFACTS_FOLDER = "mlartifacts"

FINISH_S = 120.0
"""For the last delivery while the server answers; a dead one is given up after seconds."""
GRACE_S = 15.0
"""Beyond that, before the drain is ended by force: one hanging request."""

DRAIN_ENVIRONMENT = {
    # MLflow's own defaults would wait four minutes for a server that is gone.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the drain itself tries again
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",  # it loses data in silence
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # with its password, into the drain's log
}

STATUSES = ("FINISHED", "FAILED", "KILLED")


@dataclass(frozen=True)
class Delivery:
    """What MLflow knows of a run when the driver leaves."""

    uri: str
    experiment_id: str | None
    run_id: str | None
    model_name: str | None
    model_version: str | None
    is_complete: bool
    problem: str | None
    """Why it is not complete; what is missing stays on disk and is delivered later."""


class Tracker:
    """Tells MLflow about a run while it lasts, without ever holding it up or failing it.

    A context manager around the training. Inside it, whatever is written to the run's metrics,
    journal, checkpoints and export arrives in one MLflow run, the same over all launches.

    Args:
        spec: The job.
        facts: About this launch, such as ``{"git": {...}, "dataset": {...}}``.
    """

    def __init__(self, spec: JobSpec, facts: Mapping[str, Any]) -> None:
        self._spec = spec
        self._facts = facts
        self._files = TrackingFiles(spec.run_dir)
        self._drain: subprocess.Popen[bytes] | None = None
        self._is_finished = False

    def __enter__(self) -> Self:
        try:
            self._files.describe(describe(self._spec, self._facts, self._files.run_key()))
            self._files.want("RUNNING")
            self._drain = _start_drain(self._spec.run_dir, self._files)
        except OSError as error:  # a full disk is no reason not to train
            warnings.warn(f"nothing tells MLflow about this run: {error}", stacklevel=2)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_finished:
            return
        goes_on = error is None or exit_code_of(error) in SUBMIT_AGAIN
        problem = None if error is None else problem_of(error)
        if isinstance(error, KeyboardInterrupt):
            self._leave(problem)
        else:
            self.finish("KILLED" if goes_on else "FAILED", problem=problem)

    def finish(
        self, status: str, timeout_s: float = FINISH_S, *, problem: str | None = None
    ) -> Delivery:
        """Deliver what is left, set the final status and end the drain.

        Args:
            status: ``"FINISHED"``, ``"FAILED"`` or ``"KILLED"``.
            timeout_s: For the delivery while the server answers.
            problem: Why it has not finished, for its report.
        """
        if status not in STATUSES:
            raise ValueError(f"status must be one of {', '.join(STATUSES)}, not {status!r}")
        drain = self._want(status, problem)
        try:
            if drain is None or not _finish_drain(drain, timeout_s):
                _drain_once(self._spec.run_dir, self._files, timeout_s)  # it died: another does it
        except OSError as error:
            warnings.warn(f"MLflow was not told everything: {error}", stacklevel=2)
        return delivery(self._spec.run_dir)

    def _leave(self, problem: str | None) -> None:
        """Wait for nothing; a drain without a driver delivers for some seconds more, and ends."""
        drain = self._want("KILLED", problem)
        if drain is not None and drain.stdin is not None:
            drain.stdin.close()

    def _want(self, status: str, problem: str | None) -> "subprocess.Popen[bytes] | None":
        """Write down what a tracker shall show in the end; return the drain, which is let go of."""
        self._is_finished = True
        drain, self._drain = self._drain, None
        try:
            self._files.want(status, int(time.time() * 1000), problem)
        except OSError as error:
            warnings.warn(f"MLflow will not show how this run ended: {error}", stacklevel=3)
        return drain


def deliver_pending(spec: JobSpec, timeout_s: float = FINISH_S) -> Delivery:
    """Deliver what MLflow has missed of a run that has ended; does nothing when that is nothing."""
    files = TrackingFiles(spec.run_dir)
    earlier = files.description_or_none()
    description = describe(spec, earlier.facts if earlier else {}, files.run_key())
    delivered = files.delivered()
    status, _ = files.wanted()
    told_all = delivered.is_complete and delivered.status == status
    if earlier is None or (told_all and delivered.uri == description.uri):
        return delivery(spec.run_dir)
    files.describe(description)
    _drain_once(spec.run_dir, files, timeout_s)
    return delivery(spec.run_dir)


def delivery(run_dir: Path) -> Delivery:
    """Return what MLflow is known to know of a run."""
    files = TrackingFiles(run_dir)
    delivered = files.delivered()
    status, _ = files.wanted()
    problem = delivered.problem
    is_complete = delivered.is_complete and delivered.status == status
    if not is_complete and problem is None:
        problem = f"the delivery was cut short; see {files.log}"
    return Delivery(
        uri=delivered.uri,
        experiment_id=delivered.experiment_id,
        run_id=delivered.run_id,
        model_name=delivered.model.get("name"),
        model_version=delivered.model.get("version"),
        is_complete=is_complete,
        problem=problem,
    )


def describe(spec: JobSpec, facts: Mapping[str, Any], run_key: str) -> Description:
    """Return everything the drain has to know about a job."""
    storage = spec.run_dir.parent
    uri = spec.tracking.uri or f"sqlite:///{storage / DATABASE}"
    is_served = uri.startswith(("http://", "https://", "databricks"))
    return Description(
        uri=uri,
        experiment=spec.tracking.experiment,
        run_name=spec.name,
        run_key=run_key,
        params=dict(_params(spec.model_dump(mode="json"))),
        job_toml=spec.to_toml(),
        facts=json.loads(json.dumps({"spec_digest": spec.digest(), **facts}, default=str)),
        artifact_folder=None if is_served else str(storage / ARTIFACTS_FOLDER),
        model_name=(spec.export.registered_model or spec.name) if spec.export.enabled else None,
        model_alias=spec.export.alias,
        checkpoint_artifacts=spec.tracking.checkpoint_artifacts,
        log_every=spec.tracking.log_every,
    )


def _params(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _params(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else toml_value(value)
            yield prefix + key, NONE if value is None else text


def _start_drain(run_dir: Path, files: TrackingFiles) -> subprocess.Popen[bytes]:
    files.scratch.mkdir(exist_ok=True)
    # What it leaves there when it is killed is removed by the next one.
    env = environment(**DRAIN_ENVIRONMENT, TMPDIR=str(files.scratch.resolve()))
    matplotlib_cache.keep_in(files.folder, env)
    with files.log.open("ab") as log:
        return subprocess.Popen(
            command_of("dmuon_platform.drain", str(run_dir.resolve())),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=files.folder,  # MLflow may leave files where it runs
            env=env,
            start_new_session=True,  # Ctrl-C is for the driver, which then finishes it
        )


def _drain_once(run_dir: Path, files: TrackingFiles, timeout_s: float) -> None:
    _finish_drain(_start_drain(run_dir, files), timeout_s)


def _finish_drain(drain: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Let the drain deliver what is left; return False when it had died before that."""
    try:
        drain.communicate(f"finish {timeout_s}\n".encode(), timeout_s + GRACE_S)
    except subprocess.TimeoutExpired:
        drain.kill()
        drain.communicate()
        return True  # there is no time for another one
    except OSError:
        drain.kill()
        drain.wait()
    return drain.returncode == 0
