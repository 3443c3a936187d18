"""Where runs are kept: can it be written, is it fast enough, and does it keep its promises?"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dmuon_platform.finding import Finding, State

PROBE_BYTES = 64 * 2**20
SLOW_BYTES_PER_S = 50e6
"""Below this a checkpoint of a billion parameters, 12 GB, takes over four minutes."""

LITTLE_BYTES = 5 * 2**30
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES = 512 * 2**20
"""Twice what a Ray of ours asks for; containers have 64 MiB unless told otherwise."""


def check_storage(folder: Path) -> Iterator[Finding]:
    """Yield whether runs can be kept in ``folder``, or made where it will be; nothing is left."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=there) as probe:
            yield _room(there, folder)
            yield _speed(Path(probe))
            yield _promises(Path(probe))
    except OSError as error:
        fix = "give a folder that this user and all workers can write: --storage PATH"
        yield Finding("storage", State.BROKEN, f"{folder}: {error.strerror or error}", fix)


def check_shared_memory() -> Finding:
    """Say whether Ray and data loaders find room where processes share memory."""
    about = "/dev/shm"
    try:
        there = os.statvfs(SHARED_MEMORY)
    except OSError:
        return Finding(about, State.GOOD, "none on this system")
    free = there.f_bavail * there.f_frsize
    seen = f"{free / 2**30:.1f} GiB free"
    if not os.access(SHARED_MEMORY, os.W_OK):
        return Finding(about, State.BROKEN, "cannot be written", "chmod 1777 /dev/shm as root")
    if free < LEAST_SHARED_BYTES:
        fix = "give the container more: docker run --shm-size 2g (Ray falls back to slow files)"
        return Finding(about, State.POOR, seen, fix)
    return Finding(about, State.GOOD, seen)


def _room(there: Path, folder: Path) -> Finding:
    free = shutil.disk_usage(there).free
    seen = f"{folder}, {free / 2**30:.0f} GiB free"
    if free < LITTLE_BYTES:
        fix = "make room: a checkpoint has 8 bytes for each weight of a matrix, 12 for others"
        return Finding("storage", State.POOR, seen, fix)
    return Finding("storage", State.GOOD, seen)


def _speed(folder: Path) -> Finding:
    piece = os.urandom(2**20)
    start = time.perf_counter()
    with (folder / "speed").open("wb", buffering=0) as file:
        for _ in range(PROBE_BYTES // len(piece)):
            file.write(piece)
        os.fsync(file.fileno())
    rate = PROBE_BYTES / (time.perf_counter() - start)
    seen = f"{rate / 1e6:.0f} MB/s written to the disk by one process"
    if rate < SLOW_BYTES_PER_S:
        fix = (
            "use a faster disk, or save less often (checkpoint.every): saves go on beside training"
        )
        return Finding("storage speed", State.POOR, seen, fix)
    return Finding("storage speed", State.GOOD, seen)


def _promises(folder: Path) -> Finding:
    """A commit is a rename, and one launch at a time is a lock."""
    about = "storage locks"
    (folder / "new").write_bytes(b"whole")
    os.replace(folder / "new", folder / "speed")
    if (folder / "speed").read_bytes() != b"whole":
        fix = "use a file system with atomic renames; object stores that are mounted have none"
        return Finding(about, State.BROKEN, "a rename does not replace", fix)
    try:
        with (folder / "lock").open("w") as first, (folder / "lock").open("w") as second:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return Finding(about, State.GOOD, "renames and locks work")
    except OSError as error:
        fix = "mount it with locks (NFS: without nolock); until then start no run twice at a time"
        return Finding(about, State.POOR, f"no locks ({error.strerror})", fix)
    fix = "mount it with locks that hold; until then start no run twice at a time"
    return Finding(about, State.POOR, "a lock does not keep others out", fix)
