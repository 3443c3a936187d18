"""Files that are there as a whole or not at all, also after a crash of the machine.

The library keeps its own: to import anything of it brings torch, without which the drain and
``dmuon status`` do.
"""

import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write a file that is there as a whole or not at all, also after a crash of the machine.

    Args:
        path: In a folder that exists.
        content: All of it.
        durable: Whether to wait for the disk. Without, a reader never sees half of the file
            either, but a crash of the machine may bring the earlier one back.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None where there is no file or nothing of the kind."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
