"""What a training writes down about itself: its metrics, and its part of the journal."""

import os
import socket
import time
from typing import Any

from dmuon_platform.events import Journal
from dmuon_platform.place import Place
from dmuon_platform.spec import JobSpec
from dmuon_platform.spool import MetricsSpool


class Record:
    """Rank 0 writes down what happens; the other ranks say nothing."""

    def __init__(self, spec: JobSpec, place: Place, attempt: int) -> None:
        self._place = place
        self._attempt = attempt
        self._spool = MetricsSpool(spec.run_dir) if place.is_first else None
        self._journal = Journal(spec.run_dir) if place.is_first else None

    def started(self, step: int, plan: Any) -> None:
        """Note where this attempt starts and which processes it is. Collective."""
        workers = self._place.gather({"host": socket.gethostname(), "pid": os.getpid()})
        if self._journal is not None:
            facts = {"step": step, "workers": workers, "plan": plan.to_dict()}
            self._journal.note("training_started", attempt=self._attempt, **facts)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Note what came out of a step."""
        if self._spool is not None:
            self._spool.append(step, metrics, time.time())

    def sync(self) -> None:
        """Wait until the metrics are on the disk, before a checkpoint that is ahead of them.

        Raises:
            OSError: There is no room for them.
        """
        if self._spool is not None:
            self._spool.sync()

    def stopped(self, result: dict[str, Any]) -> None:
        """Note that the training ended before its last step because somebody asked for it."""
        self._note("stopped", **{key: value for key, value in result.items() if key != "time"})

    def finished(self, result: dict[str, Any]) -> None:
        """Note that the last step is done."""
        self._note("trained", **result)

    def _note(self, kind: str, **data: Any) -> None:
        if self._journal is not None:
            self._journal.append(kind, attempt=self._attempt, **data)
