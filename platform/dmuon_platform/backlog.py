"""Lines that wait in memory while a disk is full, so that none is lost and nothing stops."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dmuon_platform.line_file import LineFile


class Backlog:
    """Appends to a file in the order in which lines came, as soon as there is room.

    Args:
        file: Of which this process is a writer.
        on_written: Told of each line when it is in the file: its content, and where it starts.
    """

    def __init__(
        self,
        file: LineFile,
        on_written: Callable[[Mapping[str, Any], int], None] = lambda content, start: None,
    ) -> None:
        self._file = file
        self._on_written = on_written
        self._waiting: deque[Mapping[str, Any]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._waiting)

    def add(self, content: Mapping[str, Any]) -> None:
        """Let a line wait for the next `write`."""
        self._waiting.append(content)

    def write(self, *, sync: bool = True) -> None:
        """Write what waits.

        Args:
            sync: Wait until the lines are on the disk.

        Raises:
            OSError: Some still wait; the next call tries again.
        """
        while self._waiting:
            start = self._file.append(self._waiting[0], sync=sync)
            self._on_written(self._waiting.popleft(), start)
