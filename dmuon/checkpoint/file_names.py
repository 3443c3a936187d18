"""Names of files that come from a checkpoint itself, which may be anybody's: only plain ones."""

import os
from pathlib import Path, PureWindowsPath

from dmuon.errors import DamagedCheckpointError

_LONGEST = 255  # bytes, on most file systems


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
