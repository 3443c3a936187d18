"""Events of a run's journal in words, one line each."""

from collections.abc import Mapping
from typing import Any

from dmuon_platform.event_facts import finite
from dmuon_platform.terminal_text import terminal_text


class _Facts(dict[str, Any]):
    """The facts of an event, of which a damaged journal may have lost some."""

    def __missing__(self, key: str) -> str:
        return "?"


_SENTENCES = {
    "launched": "launched: process {pid} on {host}",
    "job_changed": "the job has changed: {changed}",
    "waiting": "waiting for room: {what}",
    "training_started": "{team} from step {step}",
    "evaluated": "evaluation {when}: loss {loss:.4f}{bits}",
    "checkpoint_saved": "checkpoint of step {step} saved",
    "checkpoint_failed": "the checkpoint of step {step} could not be saved, the next save tries "
    "again: {problem}",
    "checkpoint_damaged": "{damage}; it is passed over",
    "went_back": "the checkpoint of step {saved} is not there any more, or not whole: the training "
    "goes on from step {step}",
    "restarted": "restart after step {step}: {cause}",
    "fault_injected": "injected on purpose: {fault} in step {step} on {on}",
    "update_dropped": "the update of step {step} was dropped: loss {loss}, gradient norm "
    "{grad_norm}",
    "rolled_back": "went back from step {step} to {to_step} (loss {loss}, gradient norm "
    "{grad_norm}); batches {first_batch} to {last_batch} are left out",
    "tracking_failed": "MLflow does not hear of everything now: {problem}; the run goes on, and "
    "the rest is told when it can be",
    "tracking_works": "MLflow has been told everything again: {uri}",
    "stopped": "stopped after step {step}: {reason}",
    "trained": "trained to step {step}",
    "finished": "finished: {steps} steps, {bits_per_byte:.3f} validation bits per byte",
}

_DETAILS = "details"
"""The fact with the traces of workers: many lines."""


def event_text(event: Mapping[str, Any]) -> str:
    """Return one line that tells an event; one of an unknown kind is told by its facts."""
    kind = str(event.get("kind"))
    if kind == "ended":
        return _ending(event)
    workers = event.get("workers")
    facts = _Facts(event)
    number = len(workers) if isinstance(workers, list) else "?"
    facts["team"] = "1 worker trains" if number == 1 else f"{number} workers train"
    changes = event.get("changes")
    facts["changed"] = ", ".join(map(str, changes)) if isinstance(changes, list) else "?"
    is_start = event.get("step") == 0
    facts["when"] = "before the first step" if is_start else f"after step {facts['step']}"
    bits = finite(event, "bits_per_byte")
    facts["bits"] = "" if bits is None else f", {bits:.3f} bits per byte"
    try:
        return _one_line(_SENTENCES[kind].format_map(facts))
    except (KeyError, TypeError, ValueError, OverflowError):
        # a kind of another version, or a number that is none
        return _one_line(" ".join([kind.replace("_", " "), *_plain(event)]))


def event_details(event: Mapping[str, Any]) -> list[str]:
    """Return what an event says beyond its one line, such as the traces of workers."""
    details = event.get(_DETAILS)
    return terminal_text(details).rstrip().splitlines() if isinstance(details, str) else []


def _ending(event: Mapping[str, Any]) -> str:
    code, problem = event.get("exit_code"), event.get("problem")
    return _one_line(
        f"the launch ended with exit code {code}" + (f": {problem}" if problem else "")
    )


def _plain(event: Mapping[str, Any]) -> list[str]:
    apart = ("kind", "time", _DETAILS)
    return [
        f"{key}={value}"
        for key, value in event.items()
        if key not in apart and isinstance(value, str | int | float)
    ]


def _one_line(text: str) -> str:
    line = " ".join(text.split())  # first, so that no control keeps words apart
    return " ".join(terminal_text(line).split())
