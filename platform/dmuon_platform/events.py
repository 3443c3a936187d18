"""The journal of a run: what happened to it, in order, over all its attempts."""

import time
from pathlib import Path
from typing import Any

from dmuon_platform.line_file import LineFile

EVENTS_FILE = "events.jsonl"


class Journal:
    """Append-only ``events.jsonl`` of one run; the driver and rank 0 both write to it."""

    def __init__(self, run_dir: Path) -> None:
        self._file = LineFile(run_dir / EVENTS_FILE)

    def append(self, kind: str, **data: Any) -> None:
        """Write down that something happened; on the disk when this returns.

        Args:
            kind: What happened, such as ``"restarted"``.
            data: Facts about it, as ``json`` can write them.
        """
        self._file.append({"kind": kind, "time": time.time(), **data})

    def read(self) -> list[dict[str, Any]]:
        """Return all events, oldest first; each has ``kind``, ``time`` and its own facts."""
        return self.read_from(0)[0]

    def read_from(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """Return the events behind ``offset`` and the offset to go on from; 0 is the start."""
        events = []
        for content, _, end in self._file.lines(offset):
            events.append(content)
            offset = end
        return events, offset

    def last(self, kind: str) -> dict[str, Any] | None:
        """Return the newest event of one kind, None without one."""
        return next((event for event in reversed(self.read()) if event["kind"] == kind), None)
