"""Names of files that come from a checkpoint itself, which may be anybody's: only plain ones."""

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


def file_in(folder: Path, name: str) -> Path:
    """The path of a file of a checkpoint.

    Raises:
        DamagedCheckpointError: it is missing, no file, or a link to somewhere else.
    """
    try:
        check_plain(name)
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{name} is a link that leaves the folder, so it is not followed")
        if not path.is_file():
            raise ValueError(f"{name} is {'not a file' if path.exists() else 'missing'}")
    except (ValueError, OSError, RuntimeError) as error:  # a link to itself is either of the last
        raise DamagedCheckpointError(folder, str(error)) from None
    return path
