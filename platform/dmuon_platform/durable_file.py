"""Files that are there as a whole or not at all, also after a crash of the machine."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that is there as a whole or not at all, also after a crash of the machine."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
