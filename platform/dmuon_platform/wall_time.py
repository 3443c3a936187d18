"""Where the wall time of a run went, and its goodput: the part spent in steps that count.

Only time with a launch counts; a run that waits to be launched again wastes nobody's machines.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dmuon_platform.event_facts import Content, finite, whole
from dmuon_platform.run_history import STEP_S, WRITTEN, RunHistory
from dmuon_platform.run_story import DROPPED


@dataclass(frozen=True)
class WallTime:
    """Seconds.

    Attributes:
        steps: In steps that count: not repeated ones, rolled back or dropped ones.
        starting: From a launch or a failure until training begins: data, Ray, workers, restore.
        closing: From the last step to the end: export and MLflow.
        total: From each launch to its end.
        between: From the end of a launch to the next.
    """

    steps: float
    starting: float
    closing: float
    total: float
    between: float

    @property
    def other(self) -> float:
        """Evaluation, saving, steps that were lost or repeated, and what failures took."""
        return max(0.0, self.total - self.steps - self.starting - self.closing)

    def parts(self) -> dict[str, float]:
        """Return seconds by what they went into, in words."""
        return {
            "steps that count": self.steps,
            "starting": self.starting,
            "closing": self.closing,
            "the rest": self.other,
        }

    @property
    def goodput(self) -> float | None:
        """Part of the total that is in `steps`; None before there is any time."""
        return min(1.0, self.steps / self.total) if self.total > 0 else None


def wall_time(history: RunHistory) -> WallTime:
    """Reckon where the time of a run went."""
    launches = list(_launches(history))
    total = sum(end - start for start, end in launches)
    pairs = pairwise(launches)
    seconds = history.curves.get(STEP_S)
    dropped = {whole(event, "step") for event in history.events if event["kind"] == DROPPED}
    lost = [] if seconds is None else [seconds.at(step) or 0.0 for step in dropped if step]
    return WallTime(
        steps=0.0 if seconds is None else sum(seconds.values) - sum(lost),
        starting=sum(_spans(history.events, ("launched", "restarted"), ("training_started",))),
        closing=sum(_spans(history.events, ("trained", "stopped"), ("ended",))),
        total=total,
        between=sum(max(0.0, later[0] - earlier[1]) for earlier, later in pairs),
    )


def _launches(history: RunHistory) -> Iterator[tuple[float, float]]:
    """Yield when each launch began and ended; one that was killed ended with its last sign."""
    written = history.curves.get(WRITTEN)
    signs = sorted([] if written is None else written.values)
    start = newest = None
    for event in history.events:
        when = finite(event, "time")
        if when is None:
            continue
        if event["kind"] == "launched":
            if start is not None and newest is not None:
                yield start, max([newest, *_last_before(signs, when)])
            start = when
        newest = when
        if event["kind"] == "ended" and start is not None:
            yield start, max(start, when)
            start = None
    if start is not None:
        yield start, max(start, history.until)


def _last_before(signs: Sequence[float], when: float) -> Sequence[float]:
    place = bisect_left(signs, when)
    return signs[place - 1 : place] if place else ()


def _spans(
    events: Sequence[Content], begins: Sequence[str], ends: Sequence[str]
) -> Iterator[float]:
    """Yield the seconds between events, from the newest beginning to the first end after it."""
    start = None
    for event in events:
        when = finite(event, "time")
        if when is not None and event["kind"] in begins:
            start = when if start is None or event["kind"] == "launched" else start
        elif when is not None and event["kind"] in ends and start is not None:
            yield max(0.0, when - start)
            start = None
        elif event["kind"] in ("launched", "ended"):
            start = None
