"""What a training writes down about itself: its metrics, and its part of the journal."""

import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from dmuon_platform.events import Journal
from dmuon_platform.metric_names import EVALUATION, TRAIN_LOSS
from dmuon_platform.place import Place
from dmuon_platform.run_story import ROLLED_BACK
from dmuon_platform.spec import JobSpec
from dmuon_platform.spool import MetricsSpool, evaluation_of
from dmuon_platform.update_table import UPDATES_FILE, UpdateTable


class Record:
    """Rank 0 writes down what happens; the other ranks say nothing.

    Attributes:
        attempt: Its number.
    """

    def __init__(self, spec: JobSpec, place: Place, attempt: int) -> None:
        self._place = place
        self.attempt = attempt
        self._spool = MetricsSpool(spec.run_dir) if place.is_first else None
        self._updates = MetricsSpool(spec.run_dir, UPDATES_FILE) if place.is_first else None
        self._journal = Journal(spec.run_dir) if place.is_first else None

    def started(self, step: int, plan: Any, restore_s: float) -> None:
        """Note where this attempt starts and which processes it is. Collective.

        Args:
            step: Optimizer steps done.
            plan: Who owns what.
            restore_s: Seconds that reading the checkpoint took.
        """
        workers = self._place.gather({"host": socket.gethostname(), "pid": os.getpid()})
        if self._journal is not None:
            facts = {
                "step": step,
                "restore_s": restore_s,
                "workers": workers,
                "plan": plan.to_dict(),
            }
            self._journal.note("training_started", attempt=self.attempt, **facts)

    def step(
        self, step: int, metrics: dict[str, float], updates: UpdateTable | None = None
    ) -> None:
        """Note what came out of a step, and what its updates were like if that was looked at.

        Args:
            step: Steps done; 0 for what is known before the first.
            metrics: Of it; an evaluation among them is told in the journal too.
            updates: Of Muon.
        """
        if self._spool is not None:
            self._spool.append(step, metrics, time.time())
        if evaluation := evaluation_of(metrics):
            facts = {key.removeprefix(EVALUATION): value for key, value in evaluation.items()}
            self.note("evaluated", step=step, **facts)
        if self._updates is not None and updates is not None:
            self._updates.append(step, updates.to_metrics(), time.time())

    def start(self, evaluate: Callable[[], dict[str, float]]) -> None:
        """Note what the weights are worth that it starts from. Collective.

        Only ever as the first line: behind others it would end the walk back over the steps.
        """
        if self._place.from_first("look for lines of earlier attempts", self._is_empty):
            self.step(0, evaluate())

    def _is_empty(self) -> bool:
        return self._spool is not None and self._spool.is_empty()

    def note(self, kind: str, **data: Any) -> None:
        """Note in the journal that something happened, now or when there is room."""
        if self._journal is not None:
            self._journal.note(kind, attempt=self.attempt, **data)

    def rolled_back(self, step: int, target: int, facts: Mapping[str, Any]) -> None:
        """Write down that the steps after ``target`` do not count; on the disk when this returns.

        Args:
            step: The one that was not applied, counted from 1.
            target: Steps done at the checkpoint.
            facts: The batches that are left out, and why.

        Raises:
            OSError: It cannot be written.
        """
        if self._spool is not None:
            self._spool.forget(target)
        if self._updates is not None and self._updates.size():
            self._updates.forget(target)
        self._note(ROLLED_BACK, step=step, to_step=target, **facts)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Return what the journal has of some kinds, oldest first; nothing on other ranks."""
        events = [] if self._journal is None else self._journal.read()
        return [event for event in events if event["kind"] in kinds]

    def losses(self, step: int, count: int) -> list[float]:
        """Return the newest finite losses up to ``step`` steps done, oldest first, on rank 0."""
        if self._spool is None:
            return []
        newest_first = self._spool.newest_first(step)
        losses = (record.metrics.get(TRAIN_LOSS, math.nan) for record in newest_first)
        return [*islice((loss for loss in losses if math.isfinite(loss)), count)][::-1]

    def sync(self) -> None:
        """Wait until the metrics are on the disk, before a checkpoint that is ahead of them.

        Raises:
            OSError: There is no room for them.
        """
        if self._spool is not None:
            self._spool.sync()
        if self._updates is not None:
            self._updates.sync()

    def stopped(self, result: dict[str, Any]) -> None:
        """Note that the training ended before its last step because somebody asked for it."""
        self._note("stopped", **{key: value for key, value in result.items() if key != "time"})

    def finished(self, result: dict[str, Any]) -> None:
        """Note that the last step is done."""
        self._note("trained", **result)

    def _note(self, kind: str, **data: Any) -> None:
        if self._journal is not None:
            self._journal.append(kind, attempt=self.attempt, **data)
