"""Paths as people write them, with ``~`` for a home folder."""

import os
from pathlib import Path


def user_path(text: str) -> Path:
    """Return the path that is meant; ``~name`` of a user who is not known here stays as it is."""
    return Path(os.path.expanduser(text))  # that of pathlib raises for such a user


def where_from(path: Path) -> str:
    """Return from where a path was looked up, as half a sentence, if it may have been relative."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        return ""
    is_maybe = not path.is_absolute() or path.is_relative_to(here)
    return f" (a relative path counts from the folder of the command, {here})" if is_maybe else ""
