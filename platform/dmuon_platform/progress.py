"""What the person who launched a job sees of it: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console

from dmuon_platform.event_facts import duration
from dmuon_platform.event_text import event_text
from dmuon_platform.events import TRACKING_FAILED, TRACKING_WORKS, Journal
from dmuon_platform.metric_names import TOKENS_PER_S, TRAIN_LOSS
from dmuon_platform.progress_bar import ProgressBar
from dmuon_platform.spec import JobSpec
from dmuon_platform.spool import MetricsSpool, Record
from dmuon_platform.stop_request import After

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
        self._is_over, self._is_starting = False, True
        self._bar = None
        if console.is_interactive:  # on a dumb terminal it would be drawn but once
            self._bar = ProgressBar(spec.name, spec.num_steps, console, clock)

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
        try:
            self.refresh(last=True)
        finally:  # also when Ctrl-C comes just here: the bar must not outlive this
            self.end()

    def refresh(self, *, last: bool = False) -> None:
        """Read what is new and show it."""
        events, self._events_offset = self._journal.read_from(self._events_offset)
        for event in events:
            self._take(event)
        records, self._offset = self._spool.read_from(self._offset)
        if records:
            self._latest, self._step = records[-1], records[-1].step
            self._first = self._first or (self._clock(), self._step)
        for event in events:
            if event["kind"] == "stopped" and event.get("after") != After.RESTART:
                self.end()
            if event["kind"] in TOLD:
                self.say(event_text(event))
        self._show(last=last)

    def end(self) -> None:
        """Show how far the run has come, and from then on only what is said."""
        if self._is_over:
            return
        self._show(last=True)
        self._is_over = True
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _take(self, event: dict[str, Any]) -> None:
        if event["kind"] == "checkpoint_saved":
            self._checkpoint = event["step"]
        elif event["kind"] == "restarted":
            self._restarts += 1
            self._is_starting = True
        elif event["kind"] == "training_started":
            self._begin_attempt(event)

    def _begin_attempt(self, event: dict[str, Any]) -> None:
        self._is_starting = False
        self._first = None  # the time between attempts says nothing about steps
        if self._latest is None or self._latest.time < event["time"]:  # else it is behind it
            self._latest = None
            self._step = self._shown_step = event["step"]

    def _show(self, *, last: bool) -> None:
        if self._is_over:
            return
        if self._bar is not None:
            self._bar.show(self._step, self._facts(last=last))
        elif self._latest is not None and self._step != self._shown_step:
            self._show_line(last=last)

    def _facts(self, *, last: bool) -> dict[str, str]:
        """Return what there is to say beside the step, by its name in a `ProgressBar`."""
        facts = {"doing": "starting workers"} if self._is_starting and not last else {}
        metrics = {} if self._latest is None else self._latest.metrics
        if TRAIN_LOSS in metrics:
            facts["loss"] = f"loss {metrics[TRAIN_LOSS]:.3f}"
            facts["speed"] = f"{metrics[TOKENS_PER_S]:,.0f} tokens/s"
        if self._checkpoint is not None:
            facts["checkpoint"] = f"checkpoint {self._checkpoint}"
        if self._restarts:
            facts["restarts"] = f"restarts {self._restarts}"
        left_s = None if last else self._left_s()
        if left_s is not None:
            facts["left"] = f"{duration(left_s)} left"
        return facts

    def _left_s(self) -> float | None:
        """Return the time left at the pace of this attempt; None while that is not known."""
        since, first_step = self._first or (0.0, self._step)
        if not first_step < self._step < self._num_steps:
            return None
        pace_s = (self._clock() - since) / (self._step - first_step)
        return pace_s * (self._num_steps - self._step)

    def _show_line(self, *, last: bool) -> None:
        now = self._clock()
        if now - self._last_line_at < PLAIN_EVERY_S and not last:
            return
        self._last_line_at, self._shown_step = now, self._step
        self.say(
            "  ".join([f"step {self._step}/{self._num_steps}", *self._facts(last=last).values()])
        )
