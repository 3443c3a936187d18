"""Files that are there as a whole or not at all, also after a crash of the machine."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dmuon.checkpoint.facts import FileFacts


class HashedFile:
    """A file being written, whose SHA-256 is known without reading it again."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``; a memoryview must be one of bytes."""
        self._file.write(data)
        self._hash.update(data)
        self._size += len(data)

    def facts(self) -> FileFacts:
        """Size and SHA-256 of what was written so far."""
        return FileFacts(self._size, self._hash.hexdigest())


@contextmanager
def whole_file(path: Path) -> Iterator[HashedFile]:
    """Open a file that appears under its name at the end, when it is whole and on the disk.

    When the body raises, nothing is left of it, and what had the name before is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # of a process that died, had the same number
    try:
        with temporary.open("xb") as file:
            yield HashedFile(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_file(path: Path, data: bytes) -> FileFacts:
    """Write a small file whole; when this returns it survives a crash of the machine."""
    with whole_file(path) as file:
        file.write(data)
        return file.facts()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
