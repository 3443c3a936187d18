"""Whether a run goes on, and if not how it ended: its state, and the exit code for a scheduler."""

from collections.abc import Sequence
from enum import StrEnum

from dmuon_platform.errors import RUNNING, SUBMIT_AGAIN, GracefulStop, PlatformError
from dmuon_platform.event_facts import Content, last, whole
from dmuon_platform.spec import JobSpec


class State(StrEnum):
    """What a run is doing, or how it ended."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """On request, after a checkpoint."""
    INTERRUPTED = "interrupted"
    """Its driver is gone without a word: killed, or the machine."""
    FAILED = "failed"
    REFUSED = "refused"
    """Of a submission alone: its job was refused, and the run is as it was."""


def ending_of(
    events: Sequence[Content], is_alive: bool, spec: JobSpec | None
) -> tuple[State, int, str | None]:
    """Return the state, the exit code, and why it ended if it should not have."""
    if is_alive:
        return State.RUNNING, RUNNING, None
    if _is_finished(events, spec):  # however a launch ended since: there was nothing left to do
        return State.FINISHED, 0, None
    newest = last(events, "launched", "ended", "finished")
    if newest is None or newest["kind"] == "launched":
        return State.INTERRUPTED, GracefulStop.exit_code, "its driver is gone without a word"
    return _ended(events, newest, spec)


def _is_finished(events: Sequence[Content], spec: JobSpec | None) -> bool:
    steps = whole(last(events, "finished"), "steps")
    return spec is not None and steps is not None and steps >= spec.num_steps


def _ended(
    events: Sequence[Content], newest: Content, spec: JobSpec | None
) -> tuple[State, int, str | None]:
    code = 0 if newest["kind"] == "finished" else whole(newest, "exit_code")
    if code != 0:
        return _unfinished(code, str(newest.get("problem", "")))
    steps = whole(last(events, "finished"), "steps")
    if spec is None or steps is None:
        return State.FINISHED, 0, None
    problem = f"it finished {steps} steps, and its job now has {spec.num_steps}"
    return State.STOPPED, GracefulStop.exit_code, problem


def _unfinished(code: int | None, problem: str) -> tuple[State, int, str]:
    if code in SUBMIT_AGAIN:
        return State.STOPPED, GracefulStop.exit_code, problem
    return State.FAILED, PlatformError.exit_code if code is None else code, problem
