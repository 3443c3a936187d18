"""What the person who launched a job sees of it: a bar on a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from dmuon_platform.events import Journal
from dmuon_platform.spec import JobSpec
from dmuon_platform.spool import MetricsSpool

PLAIN_EVERY_S = 5.0
"""Seconds between two lines when the output is not a terminal."""


class ProgressView:
    """Follows the metrics and the journal of a run; reads files alone and holds nothing up."""

    def __init__(self, spec: JobSpec, console: Console) -> None:
        self._num_steps = spec.num_steps
        self._spool = MetricsSpool(spec.run_dir)
        self._journal = Journal(spec.run_dir)
        self._console = console
        self._offset = 0
        self._events_seen = len(self._journal.read())
        self._latest: dict[str, Any] = {}
        self._step = 0
        self._checkpoint: int | None = None
        self._restarts = 0
        self._first: tuple[float, int] | None = None
        self._last_line_at = 0.0
        self._bar = _Bar(spec, console) if console.is_terminal else None

    @property
    def step(self) -> int:
        """Steps done, as far as the metrics tell."""
        return self._step

    @property
    def restarts(self) -> int:
        """How often the run was started again since this view began."""
        return self._restarts

    def __enter__(self) -> Self:
        self.refresh()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.refresh(last=True)
        if self._bar is not None:
            self._bar.stop()

    def refresh(self, *, last: bool = False) -> None:
        """Read what is new and show it."""
        before = self._step
        records, self._offset = self._spool.read_from(self._offset)
        for record in records:
            self._latest, self._step = record.metrics, record.step
        self._read_events()
        if self._bar is not None:
            self._bar.show(self._step, self._facts())
        elif self._step != before:
            self._show_line(last=last)

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _read_events(self) -> None:
        events = self._journal.read()
        for event in events[self._events_seen :]:
            if event["kind"] == "checkpoint_saved":
                self._checkpoint = event["step"]
            elif event["kind"] == "checkpoint_failed":
                self.say(
                    f"the checkpoint of step {event['step']} could not be saved, the next save "
                    f"tries again: {event['problem']}"
                )
            elif event["kind"] == "checkpoint_damaged":
                self.say(f"{event['damage']}; it is passed over")
            elif event["kind"] == "restarted":
                self._restarts += 1
                self._first = None
                self.say(f"restart {self._restarts} after step {event['step']}: {event['cause']}")
            elif event["kind"] == "training_started":
                self._step = event["step"]
                self.say(f"{len(event['workers'])} workers train from step {event['step']}")
        self._events_seen = len(events)

    def _facts(self) -> str:
        parts = []
        if "train/loss" in self._latest:
            parts.append(f"loss {self._latest['train/loss']:.3f}")
            parts.append(f"{self._latest['speed/tokens_per_s']:,.0f} tokens/s")
        if self._checkpoint is not None:
            parts.append(f"checkpoint {self._checkpoint}")
        if self._restarts:
            parts.append(f"restarts {self._restarts}")
        return "  ".join(parts)

    def _show_line(self, *, last: bool) -> None:
        now = time.monotonic()
        self._first = self._first or (now, self._step)
        if now - self._last_line_at < PLAIN_EVERY_S and not last:
            return
        self._last_line_at = now
        eta = ""
        since, first_step = self._first
        if first_step < self._step < self._num_steps:
            left_s = (now - since) / (self._step - first_step) * (self._num_steps - self._step)
            eta = f"  {left_s:.0f} s left"
        self.say(f"step {self._step}/{self._num_steps}  {self._facts()}{eta}")


class _Bar:
    """The rich progress bar of one run."""

    def __init__(self, spec: JobSpec, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: TaskID = self._progress.add_task(spec.name, total=spec.num_steps, facts="")

    def start(self) -> None:
        self._progress.start()

    def show(self, step: int, facts: str) -> None:
        self._progress.update(self._task, completed=step, facts=facts)

    def stop(self) -> None:
        self._progress.stop()
