"""A run's state as text for people and as plain data for programs."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from dmuon_platform.event_facts import MINUTE_S, clock, duration
from dmuon_platform.handover import Handover
from dmuon_platform.metric_names import (
    BIGRAM_BITS_PER_BYTE,
    BITS_PER_BYTE,
    EVALUATION_LOSS,
    TRAIN_LOSS,
)
from dmuon_platform.run_ending import State
from dmuon_platform.run_folder import resume_there, words_for
from dmuon_platform.run_state import Restart, RunState, Worker
from dmuon_platform.terminal_text import terminal_text
from dmuon_platform.text_table import text_table


def report(run: RunState, now: float) -> str:
    """Return a run's state as lines for people."""
    rows = list(_rows(run, now))
    width = max(len(label) for label, _ in rows)
    lines = [f"{label:<{width}}  {value}".rstrip() for label, value in rows]
    return terminal_text("\n".join([f"{run.name}: {_headline(run)}", *lines]))


def table(runs: Sequence[RunState], now: float) -> str:
    """Return many runs as a table, one a line."""
    header = ("NAME", "STATE", "STEP", "LOSS", "TOKENS/S", "CHECKPOINT", "RESTARTS", "SEEN")
    rows = [
        (
            run.name,
            str(run.state),
            f"{run.step}/{'?' if run.num_steps is None else run.num_steps}",
            _number(run.metrics.get(TRAIN_LOSS), ".3f") or "-",
            _number(run.tokens_per_s, ",.0f") or "-",
            "-" if run.checkpoint is None else str(run.checkpoint.step),
            str(run.num_restarts),
            "-" if run.time is None else f"{duration(now - run.time)} ago",
        )
        for run in runs
    ]
    return text_table(header, rows)


def plain(run: RunState, now: float) -> dict[str, Any]:
    """Return a run's state as JSON can have it; times are Unix times, and ages seconds."""
    checkpoint = run.checkpoint
    return finite(
        {
            "name": run.name,
            "folder": str(run.folder),
            "state": str(run.state),
            "exit_code": run.exit_code,
            "step": run.step,
            "step_time": run.step_time,
            "num_steps": run.num_steps,
            "loss": run.metrics.get(TRAIN_LOSS),
            "metrics": dict(run.metrics),
            "evaluation": dict(run.evaluation),
            "tokens_per_s": run.tokens_per_s,
            "eta_s": run.eta_s,
            "time": run.time,
            "waiting": run.waiting,
            "workers": [vars(worker) for worker in run.workers],
            "checkpoint": None
            if checkpoint is None
            else {
                "step": checkpoint.step,
                "path": str(checkpoint.path),
                "created": checkpoint.created,
                "age_s": now - checkpoint.created,
            },
            "num_restarts": run.num_restarts,
            "restarts": [vars(restart) for restart in run.restarts],
            "driver": None if run.driver is None else vars(run.driver),
            "problem": run.problem,
            "stopping": run.stopping,
            "tracking": dict(run.tracking),
            "submitted": None if run.handover is None else vars(run.handover),
            "notes": list(run.notes),
        }
    )


def finite(content: Any) -> Any:
    """Return plain data in which NaN and infinities, which JSON has not, are text."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list):
        return [finite(value) for value in content]
    return str(content) if isinstance(content, float) and not math.isfinite(content) else content


def _headline(run: RunState) -> str:
    if run.handover is not None and run.handover.is_pending:
        return f"{run.state}, and submitted again"
    if run.state in (State.STOPPED, State.INTERRUPTED):
        return f"{run.state}; {_way_on(run)}"
    if run.state is State.FAILED:
        return f"failed with exit code {run.exit_code}"
    return f"running{_phase(run)}" if run.state is State.RUNNING else str(run.state)


def _way_on(run: RunState) -> str:
    is_resumable = run.num_steps is not None  # its job is recorded and can be read
    if run.driver is None or run.driver.ray_job is None:
        here = f"`dmuon resume {words_for(run.folder)}` goes on with it"
        return here if is_resumable else "run its job again"
    if run.driver.job_server is None or not is_resumable:
        return f"submit its job again, which ran as {run.driver.ray_job}"
    there = resume_there(run.folder.absolute(), run.driver.job_server)
    return f"`{there}` goes on with it there"


def _phase(run: RunState) -> str:
    if run.stopping is not None:
        return ", and asked to stop"
    if run.waiting is not None:
        return f"; waiting for room: {run.waiting}"
    if run.workers:
        return ""
    done = run.step == run.num_steps
    return "; the training is done" if done else "; its workers are being started"


def _rows(run: RunState, now: float) -> Iterator[tuple[str, str]]:
    facts = [
        ("why", None if run.problem is None else " ".join(run.problem.split())),
        ("asked to stop", run.stopping),
        *([(_submitted_as(run.handover), str(run.handover))] if run.handover else ()),
        ("step", _progress(run, now)),
        ("loss", _number(run.metrics.get(TRAIN_LOSS), ".4f")),
        ("evaluation", _evaluation(run)),
        ("tokens/s", _number(run.tokens_per_s, ",.0f")),
        ("time left", None if run.eta_s is None else duration(run.eta_s)),
        ("checkpoint", _checkpoint(run, now)),
        *((f"restart {n}", _restart(each)) for n, each in enumerate(run.restarts, start=1)),
        ("driver", str(run.driver) if run.driver and run.state is State.RUNNING else None),
        *((f"rank {worker.rank}", _worker(worker)) for worker in run.workers),
        ("MLflow run", _tracking(run)),
        ("last sign", None if run.time is None else f"{duration(now - run.time)} ago"),
        *(("note", note) for note in run.notes),
    ]
    yield from ((label, value) for label, value in facts if value is not None)


def _submitted_as(handover: Handover) -> str:
    return "submitted" if handover.is_pending else "note"


def _evaluation(run: RunState) -> str | None:
    loss = run.evaluation.get(EVALUATION_LOSS)
    if loss is None:
        return None
    text = f"loss {loss:.4f}"
    bits, bigram = (run.evaluation.get(name) for name in (BITS_PER_BYTE, BIGRAM_BITS_PER_BYTE))
    if bits is not None:
        text += f", {bits:.3f} bits per byte"
    if bigram is not None:
        text += f" (a bigram model has {bigram:.3f})"
    return f"{text} at step {run.evaluation['step']:.0f}"


def _restart(restart: Restart) -> str:
    at = "" if restart.time is None else f"{clock(restart.time)}, "
    return f"{at}after step {restart.step}: {restart.cause}"


def _tracking(run: RunState) -> str | None:
    if not run.tracking:
        return None
    told = str(run.tracking["run_id"] or "not reached yet")
    problem = run.tracking["problem"]
    if not problem:
        return told
    is_running = run.state is State.RUNNING
    when = "when it can be" if is_running else "when the run is launched again, also a finished one"
    return f"{told}; not all is told: {problem}; the rest is told {when}"


def _progress(run: RunState, now: float) -> str:
    text = str(run.step)
    if run.num_steps:
        text += f" of {run.num_steps} ({100 * run.step / run.num_steps:.1f} %)"
    if run.state is State.RUNNING and run.step_time is not None:  # the ranks' are of other moments
        text += f", {duration(now - run.step_time)} ago"
    return text


def _checkpoint(run: RunState, now: float) -> str:
    if run.checkpoint is None:
        return "none yet"
    return f"step {run.checkpoint.step}, {duration(now - run.checkpoint.created)} ago"


def _worker(worker: Worker) -> str:
    text = f"process {worker.pid} on {worker.host}"
    if worker.step is not None and worker.age_s is not None:
        text += f", step {worker.step}, {worker.phase}, {duration(worker.age_s)} ago"
    if worker.silent_s is not None and worker.silent_s >= MINUTE_S:
        text += f", no progress for {duration(worker.silent_s)}"
    return text


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)
