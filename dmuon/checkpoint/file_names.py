"""Paths that are given, and names of files that come from a checkpoint, which may be anybody's."""

import os
import re
from pathlib import Path, PureWindowsPath

from dmuon.errors import CheckpointError, DamagedCheckpointError, SetupError

_LONGEST = 255  # bytes, on most file systems
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # pathlib makes one slash of two; C:/ is none


def given_path(path: str | os.PathLike[str]) -> Path:
    """A path that was given, relative to the folder of the process.

    Raises:
        SetupError: it is none, or empty, which would be that folder itself.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise SetupError(
            f"the path of a checkpoint must be text or a pathlib.Path, and not empty, got {path!r}"
        )
    return Path(path)


def local_path(path: str | os.PathLike[str]) -> Path:
    """A path that was given, which must be one of the file system.

    Raises:
        CheckpointError: it is a URL.
        SetupError: it is no path, or empty.
    """
    given = given_path(path)
    if _URL.match(os.fspath(path)):
        raise CheckpointError(
            given,
            "it is a URL, but checkpoints are written and read in folders alone; mount that "
            "storage, or copy between it and a folder: dmuon checkpoint copy SOURCE TARGET",
        )
    return given


def check_plain(name: str) -> None:
    """Raise ValueError unless ``name`` is a file directly in the folder it is looked for in."""
    is_plain = (
        name not in ("", ".", "..")
        and PureWindowsPath(name).name == name  # takes both kinds of slashes, and drives
        and name.isprintable()
        and len(name.encode(errors="replace")) <= _LONGEST
    )
    if not is_plain:
        raise ValueError(f"{name[:300]!r} is not a plain file name, so it is not followed")


def plain_file(folder: Path, name: str) -> Path:
    """The path of a file in a folder; links are followed.

    Raises:
        DamagedCheckpointError: it is missing or no file, or the name is not a plain one.
    """
    try:
        check_plain(name)
    except ValueError as error:
        raise DamagedCheckpointError(folder, str(error)) from None
    path = folder / name
    if not path.is_file():
        what = "not a file" if os.path.lexists(path) else "missing"
        raise DamagedCheckpointError(folder, f"{name} is {what}")
    return path


def file_in(folder: Path, name: str) -> Path:
    """The path of a file of a checkpoint, which does not leave its folder.

    Raises:
        DamagedCheckpointError: it is missing, no file, or a link to somewhere else.
    """
    path = plain_file(folder, name)
    if not path.resolve().is_relative_to(folder.resolve()):
        reason = f"{name} is a link that leaves the folder, so it is not followed"
        raise DamagedCheckpointError(folder, reason)
    return path
