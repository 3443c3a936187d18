"""Small disks that one test alone sees."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest

LIBC = ctypes.CDLL(None, use_errno=True)


def may_mount() -> bool:
    """Whether a process of this user may have mounts of its own."""
    child = os.fork()
    if child == 0:
        try:
            own_mounts()
            mount_tmpfs(Path("/tmp"), 2**20)
            os._exit(0)
        except OSError:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def own_mounts() -> None:
    """From here on this process, and what it forks, see mounts that nobody else does."""
    new_mounts, new_user, private, recursive = 1 << 17, 1 << 28, 1 << 18, 1 << 14
    if LIBC.unshare(new_mounts | (0 if os.geteuid() == 0 else new_user)):
        raise OSError(ctypes.get_errno(), "unshare")
    mount("none", Path("/"), None, private | recursive, None)


def mount_tmpfs(where: Path, num_bytes: int, flags: int = 0) -> None:
    mount("tmpfs", where, "tmpfs", flags, f"size={num_bytes}")


def mount(what: str, where: Path, kind: str | None, flags: int, options: str | None) -> None:
    texts = [None if text is None else text.encode() for text in (what, str(where), kind, options)]
    if LIBC.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]):
        raise OSError(ctypes.get_errno(), f"mount {where}")


needs_mounts = pytest.mark.skipif(not may_mount(), reason="this user may not mount anything")


def in_process(do: Callable[[], None]) -> None:
    """Call ``do`` in a forked process, so that its mounts go with it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 0
        try:
            do()
        except BaseException as error:
            os.write(writer, str(error).encode()[-60_000:])
            code = 1
        os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        text = file.read().decode()
    status = os.waitpid(child, 0)[1]
    assert status == 0, text
