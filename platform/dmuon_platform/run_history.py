"""All that a run's files say about how it went, step by step: what pictures and reports show."""

import math
import warnings
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dmuon_platform.event_facts import Content, finite, number, whole
from dmuon_platform.events import Journal
from dmuon_platform.metric_names import (
    BITS_PER_BYTE,
    EVALUATION_LOSS,
    GRADIENT_NORM,
    LEARNING_RATE,
    TIME,
    TOKENS,
    TOKENS_PER_S,
    TRAIN_LOSS,
    UPDATES,
)
from dmuon_platform.spool import Continuation, MetricsSpool, Record
from dmuon_platform.update_table import UPDATES_FILE, UpdateTable

STEP_S = "seconds"
"""Of a whole step, which the lines do not have: its tokens over its tokens a second."""
WRITTEN = "written"
"""Unix time at which a step's line was."""

PER_OWNER = ("cost_per_owner", "bytes_per_owner", "num_matrices_per_owner")
"""Of a plan."""

_DAY_S = 86_400.0

READ = (
    TRAIN_LOSS,
    EVALUATION_LOSS,
    BITS_PER_BYTE,
    GRADIENT_NORM,
    TOKENS_PER_S,
    LEARNING_RATE,
    TIME,
    UPDATES,
)

RECORDS_AT_ONCE = 1000
MOST_POINTS = 1000
"""Of a curve in a picture, about as many as it is wide; of longer ones neighbours go together."""


class Thinned(NamedTuple):
    """A curve as it is drawn: of each ``size`` neighbours their mean, least and greatest."""

    size: int
    steps: list[float]
    means: list[float]
    least: list[float]
    greatest: list[float]


@dataclass
class Curve:
    """One number by step, each step once, in their order."""

    steps: "array[float]" = field(default_factory=lambda: array("d"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def put(self, step: int, value: float) -> None:
        """Add a point, or replace that of a step which is there."""
        place = len(self.steps)
        if place and step <= self.steps[-1]:
            place = bisect_left(self.steps, step)
            if self.steps[place] == step:
                self.values[place] = value
                return
        self.steps.insert(place, step)
        self.values.insert(place, value)

    def cut(self, step: int) -> None:
        """Forget the points after a step."""
        end = bisect_left(self.steps, step + 1)
        del self.steps[end:], self.values[end:]

    def at(self, step: int) -> float | None:
        """Return the value at a step, None where there is none."""
        place = bisect_left(self.steps, step)
        is_there = place < len(self.steps) and self.steps[place] == step
        return self.values[place] if is_there else None

    def thinned(self) -> Thinned:
        """Return at most `MOST_POINTS` points."""
        size = -(-len(self.steps) // MOST_POINTS) or 1
        parts = [self.values[start : start + size] for start in range(0, len(self.values), size)]
        steps = [self.steps[start : start + size] for start in range(0, len(self.steps), size)]
        return Thinned(
            size,
            [sum(part) / len(part) for part in steps],
            [sum(part) / len(part) for part in parts],
            [min(part) for part in parts],
            [max(part) for part in parts],
        )


@dataclass(frozen=True)
class RunHistory:
    """What is known of a run.

    Attributes:
        curves: By name of the metric; those that the run has points of.
        events: The journal.
        plan: Of the newest attempt: who owns what.
        updates: The newest look at the updates, and its step.
        continuation: How the steps that ran again came out.
        until: Unix time at which a launch without an end is taken to have ended.
        notes: What is damaged in its files.
    """

    name: str
    curves: Mapping[str, Curve]
    events: Sequence[Content]
    plan: Mapping[str, Any]
    updates: tuple[int, UpdateTable] | None
    continuation: Continuation
    until: float
    notes: Sequence[str]

    @property
    def starts(self) -> list[int]:
        """Steps at which the training began again, after the first time."""
        started = [event for event in self.events if event["kind"] == "training_started"]
        return [step for event in started[1:] if (step := whole(event, "step")) is not None]

    def is_known(self, *keys: str) -> bool:
        """Tell whether there are points of all of some metrics."""
        return all(key in self.curves for key in keys)

    def keys(self, prefix: str) -> list[str]:
        """Return the metrics whose names begin so, in order."""
        return sorted(key for key in self.curves if key.startswith(prefix))


def read_history(run_dir: Path, now: float | None = None) -> RunHistory:
    """Read a run's files; what is damaged in them is passed over and named in the notes.

    Args:
        run_dir: Its folder.
        now: Unix time, of a run that goes on; None: it ended with the last sign of it.

    Raises:
        OSError: They cannot be read.
    """
    with warnings.catch_warnings(record=True) as damages:
        warnings.simplefilter("always")
        events = Journal(run_dir).read()
        curves = _curves(MetricsSpool(run_dir))
        updates = _newest_updates(MetricsSpool(run_dir, UPDATES_FILE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same file again
        continuation = MetricsSpool(run_dir).continuation()
    plans = [event.get("plan") for event in events if event["kind"] == "training_started"]
    sound = [_sound(plan) for plan in plans if isinstance(plan, dict)]
    return RunHistory(
        name=run_dir.name,
        curves=curves,
        events=events,
        plan=sound[-1] if sound else {},
        updates=updates,
        continuation=continuation,
        until=_last_sign(events, curves) if now is None else now,
        notes=[str(damage.message) for damage in damages],
    )


def _curves(spool: MetricsSpool) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for record in _records(spool):
        if record.is_redone:  # after a roll-back: those behind it come again
            for curve in curves.values():
                curve.cut(record.step)
        for key, value in _numbers(record).items():
            if key.startswith(READ):
                curves.setdefault(key, Curve()).put(record.step, value)
        if math.isfinite(record.time):
            curves.setdefault(WRITTEN, Curve()).put(record.step, record.time)
        seconds = _seconds(record)
        if seconds is not None:
            curves.setdefault(STEP_S, Curve()).put(record.step, seconds)
    return curves


def _sound(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is whole of a plan, of which a damaged line may have lost some."""
    kept: dict[str, Any] = {}
    if (imbalance := finite(plan, "imbalance")) is not None:
        kept["imbalance"] = imbalance
    totals: dict[str, list[float]] = {
        key: plan[key] for key in PER_OWNER if _are_sizes(plan.get(key)) and plan[key]
    }
    if len(totals) == len(PER_OWNER) and len({len(each) for each in totals.values()}) == 1:
        kept |= totals
    matrices = plan.get("matrices")
    kept["matrices"] = [
        each
        for each in (matrices if isinstance(matrices, list) else [])
        if isinstance(each, dict) and isinstance(each.get("name"), str)
        if _are_sizes(each.get("shape"))
    ]
    return kept


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(each, int | float) and 0 <= each < math.inf for each in values
    )


def _last_sign(events: Sequence[Content], curves: Mapping[str, Curve]) -> float:
    written = curves.get(WRITTEN, Curve()).values
    told = [when for event in events if (when := finite(event, "time")) is not None]
    return max(max(told, default=0.0), max(written, default=0.0))


def _newest_updates(spool: MetricsSpool) -> tuple[int, UpdateTable] | None:
    newest = None
    for record in _records(spool):
        table = UpdateTable.from_metrics(_numbers(record))
        if table is not None and table.rows:
            newest = record.step, table
    return newest


def _records(spool: MetricsSpool) -> Iterator[Record]:
    """Yield all records without ever holding all of them."""
    records, offset = spool.read_from(0, RECORDS_AT_ONCE)
    while records:
        yield from records
        records, offset = spool.read_from(offset, RECORDS_AT_ONCE)


def _numbers(record: Record) -> dict[str, float]:
    """Return the metrics of a record that are numbers, as those of a damaged line may not be."""
    found = {key: number(record.metrics, key) for key in record.metrics}
    return {key: value for key, value in found.items() if value is not None}


def _seconds(record: Record) -> float | None:
    tokens, speed = finite(record.metrics, TOKENS), finite(record.metrics, TOKENS_PER_S)
    if not tokens or not speed or record.step < 1:
        return None
    seconds = tokens / record.step / speed
    return seconds if 0 < seconds < _DAY_S else None
