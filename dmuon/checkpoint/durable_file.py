"""Files that are there as a whole or not at all, also after a crash of the machine."""

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Queue
from typing import BinaryIO

from dmuon.checkpoint.facts import FileFacts
from dmuon.checkpoint.word_sums import WordSums

MOST_WAITING = 8
"""Pieces that are written or read and not hashed yet; more would hold memory."""
SENT_BYTES = 2**25
"""After so many the disk begins to write (measured beside hashing: twice as fast as at the end)."""
PIECE_BYTES = 2**20
"""That are read at a time."""


class _Hasher:
    """SHA-256 of pieces in their order, in a thread beside writing and waiting for the disk."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._pieces: Queue[bytes | memoryview | None] = Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="dmuon sha256", daemon=True)
        self._thread.start()

    def update(self, data: bytes | memoryview) -> None:
        self._pieces.put(data)

    def finish(self) -> str:
        """Hexadecimal, of all pieces; the thread has ended when this returns."""
        if self._thread.is_alive():
            self._pieces.put(None)
            self._thread.join()
        return self._hash.hexdigest()

    def _run(self) -> None:
        while (data := self._pieces.get()) is not None:
            self._hash.update(data)


class HashedFile:
    """A file being written, whose hash and checksum are known without reading it again."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hasher = _Hasher()
        self._sums = WordSums()
        self._size = 0
        self._sent = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``, which must stay as it is; a memoryview must be one of bytes."""
        self._hasher.update(data)
        self._sums.update(data)  # here, as SHA-256 keeps its thread busy
        self._file.write(data)
        self._size += len(data)
        if self._size - self._sent >= SENT_BYTES:
            self._send()

    def _send(self) -> None:
        """Begin to bring to the disk what is written, so that the end waits for the rest alone.

        Linux does that for what it is told to forget, which nobody here will read again.
        """
        if hasattr(os, "posix_fadvise"):
            count = self._size - self._sent
            with suppress(OSError):  # a file system that takes no advice
                os.posix_fadvise(self._file.fileno(), self._sent, count, os.POSIX_FADV_DONTNEED)
        self._sent = self._size

    def facts(self) -> FileFacts:
        """Size, SHA-256 and checksum of everything, when all is written."""
        return FileFacts(self._size, self._hasher.finish(), self._sums.finish())


def sha256_of(path: Path) -> str:
    """Of all bytes of a file, hexadecimal; hashed beside the reading."""
    hasher = _Hasher()
    try:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(PIECE_BYTES):
                hasher.update(piece)
    finally:
        digest = hasher.finish()
    return digest


def sums_of(path: Path) -> str:
    """The checksum of a file, `WordSums`; its bytes come from memory once."""
    sums = WordSums()
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(sums.room):
            sums.took(count)
    return sums.finish()


@contextmanager
def whole_file(path: Path) -> Iterator[HashedFile]:
    """Open a file that appears under its name at the end, when it is whole and on the disk.

    Ask for its facts after that: hashing goes on during the wait for the disk. When the body
    raises, nothing is left of it, and what had the name before is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # of a process that died, had the same number
    try:
        with temporary.open("xb") as file:
            hashed = HashedFile(file)
            try:
                yield hashed
                file.flush()
                os.fsync(file.fileno())
            finally:
                hashed.facts()  # ends its thread
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
