"""The journal of a run: what happened to it, in order, over all its attempts."""

import time
import warnings
from pathlib import Path
from typing import Any

from dmuon_platform.backlog import Backlog
from dmuon_platform.line_file import LineFile

EVENTS_FILE = "events.jsonl"


WAITING = "waiting"
"""Kind of the event that a launch waits for room in its cluster."""

JOB_CHANGED = "job_changed"
"""Kind of the event that a run goes on with other settings."""

TRACKING_FAILED = "tracking_failed"
"""Kind of the event that MLflow cannot be told everything, from now on."""

TRACKING_WORKS = "tracking_works"
"""Kind of the event that it has been told everything again."""


class Journal:
    """Append-only ``events.jsonl`` of one run; the driver and rank 0 both write to it."""

    def __init__(self, run_dir: Path) -> None:
        self._file = LineFile(run_dir / EVENTS_FILE)
        self._waiting = Backlog(self._file)

    def append(self, kind: str, **data: Any) -> None:
        """Write down that something happened; on the disk when this returns.

        Args:
            kind: What happened, such as ``"restarted"``.
            data: Facts about it, as ``json`` can write them.

        Raises:
            OSError: It cannot be written yet, and waits for the next call of this or `note`.
        """
        self._waiting.add({"kind": kind, "time": time.time(), **data})
        self._waiting.write()

    def note(self, kind: str, **data: Any) -> None:
        """Do as `append`, and go on with a warning where it cannot be written yet."""
        try:
            self.append(kind, **data)
        except OSError as error:
            warnings.warn(
                f"{self._file.path} cannot be written ({error.strerror or error}); "
                f"{len(self._waiting)} events wait in memory, the last one is {kind} {data}",
                stacklevel=2,
            )

    def read(self) -> list[dict[str, Any]]:
        """Return all events, oldest first; each has ``kind``, ``time`` and its own facts."""
        return self.read_from(0)[0]

    def read_from(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """Return the events behind ``offset`` and the offset to go on from; 0 is the start.

        A line that does not say what happened, as a damaged journal may have, is no event.
        """
        events = []
        for content, _, end in self._file.lines(offset):
            if isinstance(content.get("kind"), str):
                events.append(content)
            offset = end
        return events, offset

    def last(self, kind: str) -> dict[str, Any] | None:
        """Return the newest event of one kind, None without one."""
        return next((event for event in reversed(self.read()) if event["kind"] == kind), None)
