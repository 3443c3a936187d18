"""Paths as people write them, with ``~`` for a home folder."""

import os
from pathlib import Path


def user_path(text: str) -> Path:
    """Return the path that is meant; ``~name`` of a user who is not known here stays as it is."""
    return Path(os.path.expanduser(text))  # that of pathlib raises for such a user
