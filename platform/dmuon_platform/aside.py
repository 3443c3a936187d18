"""Folders beside the checkpoints of a run that are none, however whole: told by their names."""

import re
from collections.abc import Mapping
from pathlib import Path

_ASIDE: Mapping[re.Pattern[str], str] = {
    re.compile(r"step-\d+\.writing-a\d+(\.killed-\d+)?"): (
        "it was never committed: an attempt still writes it, or was stopped"
    ),
    re.compile(r"step-\d+\.replaced-\d+"): "the run has saved this step again since",
    re.compile(r"step-\d+\.deleting"): "it is being deleted",
}
"""As the store names them, with why no run goes on from one."""


def why_aside(name: str) -> str | None:
    """Return why a folder of this name is no checkpoint; None where it may be one."""
    return next((why for pattern, why in _ASIDE.items() if pattern.fullmatch(name)), None)


def all_aside(folder: Path) -> dict[str, str]:
    """Return the names of such folders in ``folder``, each with the reason."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return {name: why for name in names if (why := why_aside(name)) is not None}
