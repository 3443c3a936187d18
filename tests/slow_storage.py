"""Storage that takes its time: each write to the disk waits first, in this process."""

import io
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PIECE_BYTES = 2**10  # at most so much in one write
CALLS = ("write", "pwrite", "writev", "pwritev")


class SlowDisk:
    """Counts and delays what is written to it."""

    def __init__(self, delay_s: float) -> None:
        self.num_writes = 0
        self._delay_s = delay_s
        self._is_free = threading.Event()
        self._is_free.set()

    def hold(self) -> None:
        """Let all writes wait, until there is no need any more."""
        self._is_free.clear()

    def release(self) -> None:
        self._is_free.set()

    def pause(self) -> None:
        self.num_writes += 1
        time.sleep(self._delay_s)
        self._is_free.wait()

    def slowed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def slow_call(*args: Any) -> Any:
            self.pause()
            return call(*args)

        return slow_call

    def opened(self, path: Path) -> io.BufferedWriter:
        disk = self

        class SlowFile(io.FileIO):
            def write(self, data: Any) -> int:
                disk.pause()
                return super().write(memoryview(data)[:PIECE_BYTES])

        return io.BufferedWriter(SlowFile(path, "x"))


@contextmanager
def slow_storage(delay_s: float) -> Iterator[SlowDisk]:
    """Writes of new files take ``delay_s`` each, whichever call of the system they are."""
    disk, plain_open = SlowDisk(delay_s), Path.open

    def slow_open(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        return disk.opened(path) if mode == "xb" else plain_open(path, mode, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", slow_open)
        for name in CALLS:
            patch.setattr(os, name, disk.slowed(getattr(os, name)))
        yield disk
