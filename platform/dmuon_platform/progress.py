"""What the person who launched a job sees of it: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from dmuon_platform.event_text import event_text
from dmuon_platform.events import TRACKING_FAILED, TRACKING_WORKS, Journal
from dmuon_platform.spec import JobSpec
from dmuon_platform.spool import MetricsSpool, Record

PLAIN_EVERY_S = 5.0
"""Seconds between two lines when the output is not a terminal."""

TOLD = frozenset(
    {
        "checkpoint_damaged",
        "checkpoint_failed",
        "evaluated",
        "fault_injected",
        "restarted",
        "rolled_back",
        "stopped",
        TRACKING_FAILED,
        TRACKING_WORKS,
        "training_started",
        "update_dropped",
        "went_back",
    }
)
"""Events that get a line of their own."""


class ProgressView:
    """Follows the metrics and the journal of a run; reads files alone and holds nothing up.

    What earlier launches have left is not shown: it is no progress of this one.

    Args:
        spec: The job.
        console: Where to show it.
        clock: Seconds, for the time that is left.
    """

    def __init__(
        self, spec: JobSpec, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_steps = spec.num_steps
        self._spool = MetricsSpool(spec.run_dir)
        self._journal = Journal(spec.run_dir)
        self._console = console
        self._clock = clock
        earlier, self._offset = self._spool.read_from(0)
        _, self._events_offset = self._journal.read_from(0)
        self._step = self._shown_step = earlier[-1].step if earlier else 0
        self._latest: Record | None = None
        self._checkpoint: int | None = None
        self._restarts = 0
        self._first: tuple[float, int] | None = None
        """When this attempt was first seen to have come forward, and how far it was then."""
        self._last_line_at = -PLAIN_EVERY_S
        self._bar = _Bar(spec, console) if console.is_terminal else None

    @property
    def step(self) -> int:
        """Steps done, as far as the metrics tell."""
        return self._step

    @property
    def checkpoint(self) -> int | None:
        """Steps done at the newest checkpoint made since this view began; None without one."""
        return self._checkpoint

    @property
    def restarts(self) -> int:
        """How often the run was started again since this view began."""
        return self._restarts

    def __enter__(self) -> Self:
        self.refresh()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.refresh(last=True)
        if self._bar is not None:
            self._bar.stop()

    def refresh(self, *, last: bool = False) -> None:
        """Read what is new and show it."""
        self._read_events()
        records, self._offset = self._spool.read_from(self._offset)
        if records:
            self._latest, self._step = records[-1], records[-1].step
            self._first = self._first or (self._clock(), self._step)
        if self._bar is not None:
            self._bar.show(self._step, self._facts(), self._eta())
        elif self._latest is not None and self._step != self._shown_step:
            self._show_line(last=last)

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _read_events(self) -> None:
        events, self._events_offset = self._journal.read_from(self._events_offset)
        for event in events:
            if event["kind"] == "checkpoint_saved":
                self._checkpoint = event["step"]
            elif event["kind"] == "restarted":
                self._restarts += 1
            elif event["kind"] == "training_started":
                self._begin_attempt(event)
            if event["kind"] in TOLD:
                self.say(event_text(event))

    def _begin_attempt(self, event: dict[str, Any]) -> None:
        self._first = None  # the time between attempts says nothing about steps
        if self._latest is None or self._latest.time < event["time"]:  # else it is behind it
            self._latest = None
            self._step = self._shown_step = event["step"]

    def _facts(self) -> str:
        parts = []
        metrics = {} if self._latest is None else self._latest.metrics
        if "train/loss" in metrics:
            parts.append(f"loss {metrics['train/loss']:.3f}")
            parts.append(f"{metrics['speed/tokens_per_s']:,.0f} tokens/s")
        if self._checkpoint is not None:
            parts.append(f"checkpoint {self._checkpoint}")
        if self._restarts:
            parts.append(f"restarts {self._restarts}")
        return "  ".join(parts)

    def _eta(self) -> str:
        """Return the time left at the pace of this attempt, nothing while that is not known."""
        since, first_step = self._first or (0.0, self._step)
        if not first_step < self._step < self._num_steps:
            return ""
        pace_s = (self._clock() - since) / (self._step - first_step)
        return f"{pace_s * (self._num_steps - self._step):.0f} s left"

    def _show_line(self, *, last: bool) -> None:
        now = self._clock()
        if now - self._last_line_at < PLAIN_EVERY_S and not last:
            return
        self._last_line_at, self._shown_step = now, self._step
        parts = (f"step {self._step}/{self._num_steps}", self._facts(), self._eta())
        self.say("  ".join(filter(None, parts)))


class _Bar:
    """The rich progress bar of one run."""

    def __init__(self, spec: JobSpec, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TextColumn("{task.fields[eta]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task: TaskID = self._progress.add_task(
            spec.name, total=spec.num_steps, facts="", eta=""
        )

    def start(self) -> None:
        self._progress.start()

    def show(self, step: int, facts: str, eta: str) -> None:
        self._progress.update(self._task, completed=step, facts=facts, eta=eta)

    def stop(self) -> None:
        self._progress.stop()
