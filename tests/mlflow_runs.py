"""Jobs that train nothing but leave the files of a training, and real MLflow servers for them."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import mlflow
import torch
from dmuon_platform.drain import Drain
from dmuon_platform.events import Journal
from dmuon_platform.spec import JobSpec
from dmuon_platform.spool import MetricsSpool
from dmuon_platform.tracked_run import SQLITE
from dmuon_platform.tracking import describe
from dmuon_platform.tracking_files import TrackingFiles

START_S = 120.0


def job(storage: Path, uri: str | None = None, **sections: Mapping[str, object]) -> JobSpec:
    """A job of 50 steps."""
    return JobSpec.model_validate(
        {
            "name": "tracked",
            "storage": str(storage),
            "data": {"source": "python-stdlib", "sequence_length": 32},
            "train": {"steps": 50, "global_batch_size": 4, "micro_batch_size": 2},
            "tracking": {"uri": uri},
            "export": {"registered_model": "tracked-model", "alias": "newest"},
            **sections,
        }
    )


def train(spec: JobSpec, first: int, last: int) -> None:
    """Leave the metrics of some steps."""
    spool = MetricsSpool(spec.run_dir)
    for step in range(first, last + 1):
        metrics = {"train/loss": 1 / step, "speed/tokens_per_s": step + torch.rand(()).item()}
        spool.append(step, metrics, time.time())


def start_attempt(spec: JobSpec, attempt: int, step: int) -> None:
    """Leave the event of an attempt that starts."""
    workers = [{"host": "here", "pid": 1}, {"host": "here", "pid": 2}]
    plan = {"owners": {"model.layers.0.mlp.up_proj.weight": 0}}
    Journal(spec.run_dir).append(
        "training_started", attempt=attempt, step=step, workers=workers, plan=plan
    )


def drain_of(spec: JobSpec, facts: Mapping[str, object] | None = None) -> Drain:
    """A drain in this process, which saves the start of another one."""
    files = TrackingFiles(spec.run_dir)
    description = describe(spec, facts or {}, files.run_key())
    files.describe(description)
    database = Path(description.uri.removeprefix(SQLITE))
    if description.uri.startswith(SQLITE) and not database.exists():
        database.write_bytes(_empty_database())
    return Drain(spec.run_dir)


@cache
def _empty_database() -> bytes:
    """What MLflow makes of no file, over all versions of its schema, which takes seconds."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mlflow.db"
        mlflow.MlflowClient(f"{SQLITE}{file}").search_experiments()
        return file.read_bytes()


def history(uri: str, run_id: str, key: str) -> list[tuple[int, float]]:
    """Steps and values of a curve, as the tracker has it."""
    client = mlflow.MlflowClient(uri)
    return [(point.step, point.value) for point in client.get_metric_history(run_id, key)]


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Server:
    """A real ``mlflow server`` on this machine, with its database and artifacts in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        environment = {
            **os.environ,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "TMPDIR": str(self.folder),  # of what is killed something stays
        }
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a group of its own, so that kill() reaps all of it
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError((self.folder / "server.log").read_text())
            time.sleep(0.2)

    def kill(self) -> None:
        """SIGKILL it with everything it started."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Let it accept connections and never answer."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.uri}/health", timeout=2) as answer:
                return answer.status == 200
        except (URLError, OSError):
            return False
