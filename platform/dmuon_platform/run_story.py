"""What the journal of a run says about its attempts, as tags of a tracker."""

from collections.abc import Mapping, Sequence
from typing import Any

from dmuon_platform.event_facts import whole
from dmuon_platform.spool import Continuation

Events = Sequence[Mapping[str, Any]]

DROPPED = "update_dropped"
ROLLED_BACK = "rolled_back"


def tags_of(events: Events, continuation: Continuation) -> dict[str, str]:
    """Return attempts, restarts with their causes, and the proof of continuation."""
    started = [event for event in events if event["kind"] == "training_started"]
    restarted = [event for event in events if event["kind"] == "restarted"]
    tags: dict[str, Any] = {"attempts": len(started), "restarts": restarts_of(events)}
    for event in started:
        workers = event.get("workers", [])
        hosts = sorted({str(worker.get("host")) for worker in workers})
        prefix = f"attempt.{event.get('attempt')}"
        tags |= {
            f"{prefix}.from_step": event.get("step"),
            f"{prefix}.workers": len(workers),
            f"{prefix}.hosts": ", ".join(hosts),
        }
    for number, event in enumerate(restarted, start=1):
        tags[f"restart.{number}.after_step"] = event.get("step")
        tags[f"restart.{number}.cause"] = event.get("cause")
    tags |= _setbacks(events)
    trained = [event for event in events if event["kind"] == "trained"]
    if trained:
        tags["weights_sha256"] = trained[-1].get("weights_sha256")
    if continuation.equal or continuation.different:
        tags["continuation.equal_steps"] = continuation.equal
        tags["continuation.different_steps"] = continuation.different
    return {key: str(value) for key, value in tags.items()}


def _setbacks(events: Events) -> dict[str, int]:
    """Count the updates that were dropped, each step once, and the batches left out."""
    dropped = {event.get("step") for event in events if event["kind"] == DROPPED}
    rolled = [event for event in events if event["kind"] == ROLLED_BACK]
    windows = [(whole(event, "first_batch"), whole(event, "last_batch")) for event in rolled]
    left_out = sum(b - a + 1 for a, b in windows if a is not None and b is not None)
    counts = {"dropped_updates": len(dropped), "roll_backs": len(rolled)}
    if rolled:
        counts["batches_left_out"] = left_out
    return {name: count for name, count in counts.items() if count}


def restarts_of(events: Events) -> int:
    """Count the attempts that began because a fault had ended the one before, over all launches.

    A fault is what the supervisor answers, and whatever ends a launch that nobody asked to end,
    such as SIGKILL. To go on after a stop that was asked for, with other workers, or with a
    finished run because it shall have more steps, is no restart.
    """
    restarts = 0
    is_underway = has_failed = False
    for event in events:
        if event["kind"] == "training_started":
            restarts += is_underway or has_failed
            is_underway, has_failed = True, False
        elif event["kind"] == "restarted":
            has_failed = True
        elif event["kind"] in ("trained", "stopped") or event.get("is_asked") is True:
            is_underway = False
    return restarts


def plans_of(events: Events) -> dict[str, Mapping[str, Any]]:
    """Return the plan of each attempt: who owns what, what it costs."""
    return {
        f"attempt-{event.get('attempt')}": event["plan"]
        for event in events
        if event["kind"] == "training_started" and event.get("plan")
    }
