"""Runs the command as a user does, in a process of its own, and reads what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

REPOSITORY = Path(__file__).parents[2]

STEPS = 60

PATIENCE_S = 900
"""For what ends in half a minute on a machine that does nothing else; other tests run beside."""

JOB = """
name = "{name}"
storage = "{storage}"

[model]
vocab_size = 257
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2

[data]
source = "{text}"
sequence_length = 64

[optimizer]
lr = 0.02
adamw_lr = 0.01

[schedule]
kind = "cosine"
warmup_steps = 5

[train]
steps = {steps}
global_batch_size = 16
micro_batch_size = 4

[evaluation]
every = 20
sequences = 33

[checkpoint]
every = 10
keep_last = 2

[resources]
workers = 2
"""


@dataclass(frozen=True)
class Run:
    """A job file, and where its run lies."""

    job: Path
    folder: Path

    def metrics(self) -> dict[int, dict[str, float]]:
        """Every step's metrics; those of a clock left out."""
        records = self.lines("metrics.jsonl")
        return {
            r["step"]: {k: v for k, v in r["metrics"].items() if k.startswith(("train", "eval"))}
            for r in records
            if "replay" not in r
        }

    def results(self) -> tuple[dict[int, dict[str, float]], str]:
        """Every step's metrics, and the digest of all weights at the end."""
        return self.metrics(), self.events("trained")[-1]["weights_sha256"]

    def replays(self) -> list[dict[str, Any]]:
        """The steps that were done again, each with what came out differently."""
        return [r for r in self.lines("metrics.jsonl") if "replay" in r]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The journal's entries of one kind."""
        return [r for r in self.lines("events.jsonl") if r["kind"] == kind]

    def frozen(self) -> AbstractContextManager[None]:
        """Freeze a worker, so that the run waits where it is until something has happened."""
        worker = self.events("training_started")[-1]["workers"][-1]["pid"]
        return suspended(psutil.Process(worker))

    def lines(self, name: str) -> list[dict[str, Any]]:
        """What is in one of its files."""
        return [json.loads(line) for line in _lines(self.folder / name)]


def _lines(path: Path) -> list[str]:
    # A line may just be in the writing: the last piece is whole only when the text ends in \n.
    return path.read_text().split("\n")[:-1] if path.exists() else []


def make_run(folder: Path, text: Path, name: str = "small", steps: int = STEPS) -> Run:
    """Write a small job below ``folder``."""
    storage = folder / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / f"{name}.toml"
    job.write_text(JOB.format(name=name, storage=storage, text=text, steps=steps))
    return Run(job, storage / name)


def tracked_status(run: Run) -> str:
    """Return what MLflow shows of a run."""
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{run.folder.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("dmuon")
    (tracked,) = client.search_runs([experiment.experiment_id])
    return tracked.info.status


def settings(*pairs: str) -> list[str]:
    """Return the arguments that change the job: ``"train.steps=10"``."""
    return [part for pair in pairs for part in ("--set", pair)]


def start(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    """Start the command in a process group of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-m", "dmuon_platform.cli", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**env, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = PATIENCE_S) -> tuple[int, str]:
    """Wait for the command; return its exit code and all it printed."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout_s} s:\n{output}") from None
    return process.returncode, output


def run(*arguments: str | Path, **environment: str) -> tuple[int, str]:
    """Run the command to its end."""
    return finish(start(*arguments, **environment))


def family(process: subprocess.Popen[str], name: str) -> list[psutil.Process]:
    """Return the processes below the command whose own command line says ``name``."""
    if process.poll() is not None:
        return []
    found = []
    for each in psutil.Process(process.pid).children(recursive=True):
        try:
            if name in " ".join(each.cmdline()):
                found.append(each)
        except psutil.Error:
            continue  # it has ended meanwhile
    return found


@contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    """Freeze a process until something has happened."""
    process.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):  # it may have been killed for that
            process.resume()


def trains(run: Run, attempts: int, step: int) -> Callable[[], bool]:
    """Return whether the newest of so many attempts has come to a step, as a condition."""

    def condition() -> bool:
        started = run.events("training_started")
        return len(started) == attempts and max(run.metrics(), default=0) >= step

    return condition


def wait_until(
    condition: Callable[[], Any],
    process: subprocess.Popen[str] | None = None,
    timeout_s: float = PATIENCE_S,
) -> None:
    """Wait until something is so, while the command, if one is given, still runs."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended too early ({process.returncode}):\n{finish(process)[1]}")
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
