"""Each time that a run began to train: when, on how many workers, after what, its end."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dmuon_platform.errors import GracefulStop
from dmuon_platform.event_facts import Content, number, whole
from dmuon_platform.event_text import event_text

GONE = "its command left no word: killed, or its machine lost"


@dataclass(frozen=True)
class TrainingStart:
    """One start of the training; None is what its journal does not say.

    Attributes:
        time: Unix time.
        step: From which on it trained.
        num_workers: How many trained.
        began: Why there was a start.
        ended: How what was started ended.
    """

    time: float | None
    step: int | None
    num_workers: int | None
    began: str
    ended: str | None = None


def starts_of(events: Iterable[Content], now: str) -> list[TrainingStart]:
    """Return the starts that a journal tells of.

    Args:
        events: The journal.
        now: How the newest one ended, or that it goes on, unless the journal says so.
    """
    story = _Story()
    for event in events:
        story.tell(event)
    story.end(now)
    return story.starts


class _Story:
    """Reads a journal from its first event to its last."""

    def __init__(self) -> None:
        self.starts: list[TrainingStart] = []
        self._began = ""
        self._is_launch_new = True
        self._untold: str | None = None
        """How something ended since the last start that had not come to train."""

    def tell(self, event: Content) -> None:
        match event["kind"]:
            case "launched":
                self.end(GONE)
                self._began = "launched again" if self._began else "launched"
                self._is_launch_new = True
            case "job_changed":
                self._began += f"; {event_text(event)}"
            case "training_started":
                self._start(event)
            case "restarted":
                self._end_attempt(f"failed after step {event.get('step', '?')}: {_cause(event)}")
                self._began = "the same launch, after the failure"
            case "stopped":
                self.end(_stopped(event))
            case "trained":
                self.end(event_text(event))
            case "ended":
                self._end_launch(event)

    def end(self, how: str) -> None:
        """Say how the newest start ended, unless that is known."""
        if self.starts and self.starts[-1].ended is None:
            self.starts[-1] = replace(self.starts[-1], ended=how)

    def _start(self, event: Content) -> None:
        workers = event.get("workers")
        began = self._began
        if self._untold is not None:
            began += f"; before, without a start: {self._untold}"
        self.end("?")
        self.starts.append(
            TrainingStart(
                number(event, "time"),
                whole(event, "step"),
                len(workers) if isinstance(workers, list) else None,
                began,
            )
        )
        self._began = "the same launch, as planned"
        self._is_launch_new, self._untold = False, None

    def _end_attempt(self, how: str) -> None:
        if self._is_open:
            self.end(how)
        else:
            self._untold = how

    def _end_launch(self, event: Content) -> None:
        code = whole(event, "exit_code")
        if code == 0:
            return
        how = _first_line(str(event.get("problem") or f"its command ended with exit code {code}"))
        if self._is_open or self._is_launch_new:
            self._end_attempt(how)
        elif code != GracefulStop.exit_code:  # which says again what the end of the start said
            self.starts[-1] = replace(self.starts[-1], ended=f"{self.starts[-1].ended}; {how}")

    @property
    def _is_open(self) -> bool:
        return bool(self.starts) and self.starts[-1].ended is None


def _stopped(event: Content) -> str:
    saved = whole(event, "checkpoint")
    is_saved = saved is not None and saved == whole(event, "step")
    checkpoint = "with a checkpoint" if is_saved else f"the newest checkpoint is of step {saved}"
    return f"{event_text(event)}, {checkpoint}"


def _cause(event: Mapping[str, Any]) -> str:
    return _first_line(str(event.get("cause", "unknown")))


def _first_line(text: str) -> str:
    """Return what happened; what to do about it comes in the lines below."""
    return text.partition("\n")[0]
