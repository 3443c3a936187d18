"""A file of JSON lines that only grows: whole lines, also after a crash or on a full disk."""

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

SCAN_BYTES = 1 << 20


class Line(NamedTuple):
    """One whole line: its content, where it starts, and the offset just behind it."""

    content: dict[str, Any]
    start: int
    end: int


class LineFile:
    """Appends and reads JSON objects, one a line.

    Several processes may read while one writes; a reader never sees half a line. Several may
    append short lines at once on a local disk (``O_APPEND``, one write a line).
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, content: Mapping[str, Any], *, sync: bool = True) -> int:
        """Add one line and return the offset where it starts.

        Args:
            content: What ``json`` can write; NaN and infinities are kept.
            sync: Wait until the line is on the disk, so that it survives the machine.

        Raises:
            OSError: It could not be written; the file is as before.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        data = json.dumps(content).encode() + b"\n"
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            start = size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                data = b"\n" + data  # what a killed writer left half stays a line of its own
                start += 1
            self._write(file, data, size)
            if sync:
                os.fsync(file)
        finally:
            os.close(file)
        return start

    def _write(self, file: int, data: bytes, size: int) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.write(file, data[written:])
        except OSError:
            if written:  # a full disk takes the first part of a line
                os.ftruncate(file, size)
            raise

    def repair(self) -> int:
        """Cut a torn last line off and return how many bytes it had. For the only writer."""
        if not self.path.exists():
            return 0
        with self.path.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            kept = _end_of_last_line(file.fileno(), size)
            if kept < size:
                file.truncate(kept)
                os.fsync(file.fileno())
        return size - kept

    def lines(self, offset: int = 0) -> Iterator[Line]:
        """Yield the whole lines from ``offset`` on; one that is no JSON object is named, skipped.

        Args:
            offset: 0, or an offset from an earlier line.
        """
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return  # still being written, or torn
                start, offset = offset, offset + len(raw)
                content = _parse(raw)
                if content is not None:
                    yield Line(content, start, offset)
                elif raw.strip():
                    warnings.warn(
                        f"{self.path}: the line that ends at byte {offset} is damaged and skipped",
                        stacklevel=2,
                    )

    def newest_first(self) -> Iterator[dict[str, Any]]:
        """Yield the whole lines from the last to the first, reading only as far as is asked for.

        Lines that are no JSON objects are passed over.
        """
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            rest = b""  # the end of a line whose start is not read yet
            is_torn = True  # until a line break is seen: what follows the last one
            while end > 0:
                start = max(0, end - SCAN_BYTES)
                file.seek(start)
                first, *lines = (file.read(end - start) + rest).split(b"\n")
                if lines and is_torn:
                    lines.pop()
                    is_torn = False
                yield from filter(None, map(_parse, reversed(lines)))
                rest, end = first, start
            if not is_torn and (content := _parse(rest)) is not None:
                yield content

    def at(self, start: int) -> dict[str, Any]:
        """Return the content of the line that starts at ``start``."""
        return next(self.lines(start)).content

    def size(self) -> int:
        """Return the bytes on disk."""
        return self.path.stat().st_size if self.path.exists() else 0

    def sync(self) -> None:
        """Wait until everything appended is on the disk."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _end_of_last_line(file: int, size: int) -> int:
    end = size
    while end > 0:
        start = max(0, end - SCAN_BYTES)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
