"""How long it took a run to train again after each fault, from its journal and its metrics."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

NOTICED = ("restarted", "launched")
"""Kinds of events with which the driver, or the next one, begins again."""


@dataclass(frozen=True)
class Recovery:
    """From one fault to the next training step, in seconds.

    Attributes:
        fault: Its kind.
        step: In which it struck, counted from 1.
        detection_s: Until the attempt was given up, or the killed command launched again.
        restart_s: From there until the new workers began to read a checkpoint.
        restore_s: Until they had read it.
        first_step_s: Until the first step after it was done.
        steps_again: Steps that had been done before and were done again.
    """

    fault: str
    step: int
    detection_s: float
    restart_s: float
    restore_s: float
    first_step_s: float
    steps_again: int

    @property
    def total_s(self) -> float:
        """Seconds from the fault to the end of the next step."""
        return self.detection_s + self.restart_s + self.restore_s + self.first_step_s

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {**asdict(self), "total_s": self.total_s}


def recoveries(
    events: Sequence[Mapping[str, Any]], step_times: Iterable[tuple[int, float]]
) -> list[Recovery]:
    """Find the faults that ended an attempt, and what followed each.

    Args:
        events: The journal's, oldest first.
        step_times: Steps done and Unix times, of each time that a step was done.
    """
    times = sorted(step_times, key=lambda each: each[1])
    found = []
    for index, event in enumerate(events):
        if event["kind"] == "fault_injected":
            recovery = _recovery(event, events[index + 1 :], times)
            if recovery is not None:
                found.append(recovery)
    return found


def _recovery(
    fault: Mapping[str, Any], later: Sequence[Mapping[str, Any]], times: list[tuple[int, float]]
) -> Recovery | None:
    kinds = {"fault_injected", *NOTICED, "training_started"}
    steps = [event for event in later if event["kind"] in kinds]
    if len(steps) < 2 or steps[0]["kind"] not in NOTICED:
        return None  # nothing ended by it, or something else struck meanwhile
    started = next((each for each in steps if each["kind"] == "training_started"), None)
    if started is None:
        return None
    restored = started["time"]
    stepped = next((when for _, when in times if when > restored), None)
    if stepped is None:
        return None
    done = max((step for step, when in times if when < steps[0]["time"]), default=0)
    return Recovery(
        fault=fault["fault"],
        step=fault["step"],
        detection_s=steps[0]["time"] - fault["time"],
        restart_s=restored - started["restore_s"] - steps[0]["time"],
        restore_s=started["restore_s"],
        first_step_s=stepped - restored,
        steps_again=max(0, done - started["step"]),
    )
