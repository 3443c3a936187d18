"""How a run stands, from the files in its folder alone: whoever sees the storage can tell.

Nothing here needs torch or Ray, starts or changes anything, or trusts a file to be whole.
"""

import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from dmuon_platform.catalogue import CHECKPOINTS_FOLDER
from dmuon_platform.driver_lease import Driver
from dmuon_platform.durable_file import read_object
from dmuon_platform.errors import SpecError
from dmuon_platform.event_facts import Content, clock, last, number, whole
from dmuon_platform.events import WAITING, Journal
from dmuon_platform.handover import Handover, read_handover
from dmuon_platform.heartbeat import Heartbeat, Heartbeats
from dmuon_platform.line_file import LineFile
from dmuon_platform.metric_names import TOKENS_PER_S
from dmuon_platform.run_ending import State, ending_of
from dmuon_platform.run_folder import JOB_FILE
from dmuon_platform.run_story import restarts_of
from dmuon_platform.spec import JobSpec, load_job
from dmuon_platform.spec.uri import without_credentials
from dmuon_platform.spool import METRICS_FILE, evaluation_of
from dmuon_platform.stop_request import StopFile
from dmuon_platform.tracking_files import TrackingFiles

RECENT_STEPS = 200
"""Over which the speed is taken."""

FURTHEST_LINES = 20_000
"""How far back a step and an evaluation are looked for."""

_CHECKPOINT = re.compile(r"step-(\d+)")

_ENDS_OF_ATTEMPTS = ("launched", "restarted", "stopped", "trained")


@dataclass(frozen=True)
class SavedCheckpoint:
    """The newest checkpoint that was committed; its bytes are not looked at."""

    step: int
    path: Path
    created: float
    """Unix time."""


@dataclass(frozen=True)
class Restart:
    """One time that the run was started again by itself."""

    time: float | None
    step: int | None
    cause: str


@dataclass(frozen=True)
class Worker:
    """One process that trains, as it last said."""

    rank: int
    host: str
    pid: int
    step: int | None = None
    phase: str | None = None
    age_s: float | None = None
    """Seconds since it said so, which it does every few seconds."""
    silent_s: float | None = None
    """Seconds since it came forward."""


@dataclass(frozen=True)
class RunState:
    """How a run stands.

    Attributes:
        exit_code: What ``dmuon status`` ends with.
        step: Optimizer steps done.
        step_time: Unix time at which that was so; None when it is not known.
        num_steps: Of the whole run; None when its job cannot be read.
        metrics: Of that step; none where it has no line.
        evaluation: The newest evaluation up to that step, and its own step.
        tokens_per_s: Median of the recent steps.
        eta_s: Seconds to the last step at the recent pace; None unless it is running.
        time: Unix time of the newest step or event.
        restarts: After failures, with their causes.
        num_restarts: How often training began again after a fault, also by a new launch.
        waiting: For what room in the cluster, while it runs and does not train.
        problem: Why it ended, unless it finished.
        stopping: What it was asked to stop for, if it was.
        handover: What was submitted for it since the newest launch began.
        notes: What is damaged or missing in the folder.
    """

    name: str
    folder: Path
    state: State
    exit_code: int
    step: int
    step_time: float | None
    num_steps: int | None
    metrics: Mapping[str, float]
    evaluation: Mapping[str, float]
    tokens_per_s: float | None
    eta_s: float | None
    time: float | None
    workers: Sequence[Worker]
    checkpoint: SavedCheckpoint | None
    restarts: Sequence[Restart]
    num_restarts: int
    waiting: str | None = None
    driver: Driver | None = None
    problem: str | None = None
    stopping: str | None = None
    tracking: Mapping[str, Any] = field(default_factory=dict)
    handover: Handover | None = None
    notes: Sequence[str] = ()


def read_run(folder: Path, now: float | None = None) -> RunState:
    """Read how a run stands.

    Args:
        folder: Of the run.
        now: Unix time to reckon ages from; by default the present.
    """
    with warnings.catch_warnings(record=True) as caught:  # damaged lines are told as notes
        warnings.simplefilter("always")
        return _read(folder, time.time() if now is None else now, caught)


def _read(folder: Path, now: float, caught: Sequence[warnings.WarningMessage]) -> RunState:
    spec, complaint = _job_of(folder)
    events = Journal(folder).read()
    driver = sound_driver(folder)
    is_alive = driver is not None and driver.is_alive(folder)
    state, exit_code, problem = ending_of(events, is_alive, spec)
    steps = _recent_steps(folder)
    started = last(events, "training_started")
    pace = _Pace.of(steps, since=number(started, "time"))
    step, step_time = _step_of(events, steps)
    num_steps = None if spec is None else spec.num_steps
    is_running = state is State.RUNNING
    if started is None and not (folder / JOB_FILE).exists():
        complaint = None  # a launch records its job when it has room and has prepared the data
    request = StopFile(folder).read(driver.launch) if driver and is_running else None
    newest = [number(each, "time") for each in (*events[-1:], *steps[:1])]
    return RunState(
        name=folder.name,
        folder=folder,
        state=state,
        exit_code=exit_code,
        step=step,
        step_time=step_time,
        num_steps=num_steps,
        metrics=_metrics_of(folder, step),
        evaluation=_evaluation(folder, step),
        tokens_per_s=pace.tokens_per_s,
        eta_s=pace.left_s(step, num_steps) if is_running else None,
        time=max((when for when in newest if when is not None), default=None),
        workers=_workers(folder, events, now) if is_running else (),
        checkpoint=_newest_checkpoint(folder),
        restarts=[_restart(event) for event in events if event["kind"] == "restarted"],
        num_restarts=restarts_of(events),
        waiting=_waiting(events) if is_running else None,
        driver=driver,
        problem=problem,
        stopping=None if request is None else f"{request.reason} (by {request.by})",
        tracking=_tracking(folder),
        handover=None if is_running else read_handover(folder),
        notes=[*([complaint] if complaint else []), *(str(each.message) for each in caught)],
    )


def _waiting(events: Sequence[Content]) -> str | None:
    newest = events[-1] if events else {}
    return str(newest.get("what", "?")) if newest.get("kind") == WAITING else None


def sound_driver(folder: Path) -> Driver | None:
    """Return who has the run or had it last; None if that is not known, or damaged."""
    driver = Driver.read(folder)
    times = () if driver is None else ("started", "time")
    is_sound = all(clock(number(vars(driver), key)) != "?" for key in times)
    return driver if is_sound else None


def _job_of(folder: Path) -> tuple[JobSpec | None, str | None]:
    """Return the recorded job, or what is wrong with it."""
    try:
        return load_job(folder / JOB_FILE), None
    except (SpecError, OSError, ValueError) as error:
        first, _, _ = str(error).partition("\n")
        return None, f"{JOB_FILE} cannot be read, so the number of steps is unknown: {first}"


def _recent_steps(folder: Path) -> list[Content]:
    """Return the newest lines of the metrics, newest first, repeated steps among them."""
    lines = LineFile(folder / METRICS_FILE).newest_first()
    return [line for line in islice(lines, RECENT_STEPS) if whole(line, "step") is not None]


def _step_of(events: Sequence[Content], steps: Sequence[Content]) -> tuple[int, float | None]:
    """Return the steps done, and when: of the newest line, unless an attempt went back since."""
    done, written = (whole(steps[0], "step"), number(steps[0], "time")) if steps else (0, None)
    started = last(events, "training_started")
    since = number(started, "time")
    if since is not None and (written is None or written < since):
        done, written = whole(started, "step"), since
    return done or 0, written


@dataclass(frozen=True)
class _Pace:
    """How fast the present attempt is."""

    tokens_per_s: float | None
    s_per_step: float | None

    @classmethod
    def of(cls, steps: Sequence[Content], since: float | None) -> "_Pace":
        times = [(s["step"], when) for s in steps if (when := number(s, "time")) is not None]
        mine = [(step, when) for step, when in times if since is None or when >= since]
        s_per_step = None
        if len(mine) > 1 and mine[0][0] > mine[-1][0]:
            s_per_step = (mine[0][1] - mine[-1][1]) / (mine[0][0] - mine[-1][0])
        speeds = [v for s in steps if (v := _metrics(s).get(TOKENS_PER_S)) is not None]
        return cls(median(speeds) if speeds else None, s_per_step)

    def left_s(self, step: int, num_steps: int | None) -> float | None:
        if self.s_per_step is None or num_steps is None:
            return None
        return max(0.0, self.s_per_step * (num_steps - step))


def _metrics(line: Content) -> dict[str, float]:
    metrics = line.get("metrics")
    if not isinstance(metrics, dict):
        return {}
    return {key: value for key in metrics if (value := number(metrics, key)) is not None}


def _metrics_of(folder: Path, step: int) -> dict[str, float]:
    """Return the metrics of a step; of one that was done again, they are in its first line."""
    return next((_metrics(line) for line in _told(folder, step) if line["step"] == step), {})


def _evaluation(folder: Path, step: int) -> dict[str, float]:
    for line in _told(folder, step):
        if found := evaluation_of(_metrics(line)):
            return {"step": float(line["step"]), **found}
    return {}


def _told(folder: Path, step: int) -> Iterator[Content]:
    """Yield the lines with metrics up to a step, newest first; later ones are to be done again."""
    lines = LineFile(folder / METRICS_FILE).newest_first()
    for line in islice(lines, FURTHEST_LINES):
        done = whole(line, "step")
        if done is not None and done <= step and _metrics(line):
            yield line


def _workers(folder: Path, events: Sequence[Content], now: float) -> list[Worker]:
    """Return the workers of the present attempt; none while they are being started again."""
    started = last(events, "training_started")
    newest = last(events, "training_started", *_ENDS_OF_ATTEMPTS)
    attempt = max(whole(event, "attempt") or 0 for event in (started, newest))
    is_over = newest is not started
    beats = Heartbeats(folder).read()
    if beats and beats[0].attempt >= attempt + is_over:
        return [_worker_of(beat, now) for beat in beats]
    told = None if started is None or is_over else started.get("workers")
    workers = told if isinstance(told, list) else []
    return [
        Worker(rank, str(each.get("host")), whole(each, "pid") or 0)
        for rank, each in enumerate(workers)
        if isinstance(each, dict)
    ]


def _worker_of(beat: Heartbeat, now: float) -> Worker:
    age_s, silent_s = (max(0.0, now - when) for when in (beat.time, beat.progress))
    phase = str(beat.phase)
    return Worker(beat.rank, beat.host, beat.pid, beat.step, phase, age_s, silent_s)


def _restart(event: Content) -> Restart:
    cause = str(event.get("cause", "unknown"))
    return Restart(number(event, "time"), whole(event, "step"), cause)


def _newest_checkpoint(folder: Path) -> SavedCheckpoint | None:
    found: list[tuple[int, Path]] = []
    with_names = (folder / CHECKPOINTS_FOLDER).glob("step-*")
    found = [(int(m[1]), path) for path in with_names if (m := _CHECKPOINT.fullmatch(path.name))]
    for step, path in sorted(found, reverse=True):
        manifest = read_object(path / "manifest.json")
        created = number(manifest, "created")
        if created is not None:
            return SavedCheckpoint(step, path, created)
    return None


def _tracking(folder: Path) -> dict[str, Any]:
    delivered = TrackingFiles(folder).delivered()
    if not delivered.uri:
        return {}
    uri = without_credentials(str(delivered.uri))  # a damaged file may hold anything
    return {"uri": uri, "run_id": delivered.run_id, "problem": delivered.problem}
