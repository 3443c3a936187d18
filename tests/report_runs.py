"""Run folders as a training leaves them, by the platform's own writers, with numbers to check."""

import time
from collections.abc import Iterable
from pathlib import Path

from dmuon_platform.errors import exit_code_of, problem_of
from dmuon_platform.events import Journal
from dmuon_platform.spec import JobSpec, job_of
from dmuon_platform.spool import MetricsSpool
from dmuon_platform.update_table import UPDATES_FILE, UpdateRow, UpdateTable
from small_job import small

STEPS = 60
BAND = (0.846, 1.124)
NAMES = ("layers.0.q_proj.weight", "layers.2.experts[1]:0", "layers.10.up_proj.weight")
PLAN = {
    "num_owners": 2,
    "imbalance": 1.09,
    "cost_per_owner": [3_000_000_000, 2_500_000_000],
    "bytes_per_owner": [2**21, 2**20],
    "num_matrices_per_owner": [2, 1],
    "matrices": [
        {"name": name.partition("[")[0], "shape": [24, 32], "owner": owner}
        for owner, name in zip((0, 1, 0), NAMES, strict=True)
    ],
}
WORKERS = [{"host": "far", "pid": 8}, {"host": "far", "pid": 9}]


def updates(step: int, worst: float = 0.4) -> UpdateTable:
    rows = {
        name: UpdateRow(24, 32, 1.1 - 0.01 * place, 0.2 + 0.1 * place, 1e-3 / step, 0.25)
        for place, name in enumerate(NAMES)
    }
    rows[NAMES[-1]] = UpdateRow(24, 32, 1.12, worst, 2e-3 / step, 0.5)
    return UpdateTable(rows, BAND)


def begin(folder: Path, steps: int = STEPS) -> JobSpec:
    """A run that was launched, and has recorded its job."""
    spec = job_of(small(name="mine", storage=str(folder.parent), train__steps=steps))
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text(spec.to_toml())
    Journal(folder).append("launched", host="far", pid=7)
    return spec


def start(folder: Path, step: int, attempt: int = 1) -> None:
    facts = {"restore_s": 0.1, "workers": WORKERS, "plan": PLAN}
    Journal(folder).append("training_started", attempt=attempt, step=step, **facts)


def train(folder: Path, steps: Iterable[int], worst: float = 0.4) -> None:
    """Lines of these steps, as `Record` writes them."""
    spool, looks = MetricsSpool(folder), MetricsSpool(folder, UPDATES_FILE)
    for step in steps:
        metrics = {
            "train/loss": 1 + 4 / step,
            "train/grad_norm": 0.5 + 1 / step,
            "train/tokens": 4096.0 * step,
            "train/lr_muon": 0.02,
            "train/lr_adamw": 0.003,
            "speed/tokens_per_s": 8192.0,  # half a second
            "time/data_s": 0.01,
            "time/forward_backward_s": 0.4,
            "time/optimizer_s": 0.05,
        }
        if step % 20 == 0:
            metrics |= {"evaluation/loss": 1.2 + 4 / step, "evaluation/bits_per_byte": 2.5}
        if step == 1 or step % 10 == 0:
            table = updates(step, worst)
            metrics |= table.summary()
            looks.append(step, table.to_metrics(), time.time())
        spool.append(step, metrics, time.time())


def restart(folder: Path, step: int, cause: str) -> None:
    Journal(folder).append("restarted", attempt=1, step=step, cause=cause)


def launch_and_start(folder: Path, step: int, *changes: str) -> None:
    Journal(folder).append("launched", host="far", pid=7)
    if changes:
        Journal(folder).append("job_changed", changes=changes)
    start(folder, step)


def stop(folder: Path, step: int, reason: str, after: str = "end") -> None:
    facts = {"checkpoint": step, "reason": reason, "after": after}
    Journal(folder).append("stopped", attempt=1, step=step, **facts)


def end(folder: Path, error: BaseException) -> None:
    code, problem = exit_code_of(error), problem_of(error)
    Journal(folder).append("ended", exit_code=code, problem=problem)


def finish(folder: Path, steps: int = STEPS) -> None:
    journal = Journal(folder)
    journal.append("trained", attempt=1, step=steps, weights_sha256="ab" * 32)
    journal.append("finished", steps=steps)
    journal.append("ended", exit_code=0)
