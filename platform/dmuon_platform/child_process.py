"""Python processes of ours beside the command's own."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]


def command_of(module: str, *arguments: str) -> Sequence[str]:
    """Return the command that runs one of our modules, and none that the working folder has."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(**changes: str) -> dict[str, str]:
    """Return our environment, in which a process finds the packages that we run ourselves."""
    library = importlib.util.find_spec("dmuon")
    folders = [str(SOURCE), os.environ.get("PYTHONPATH")]
    if library is not None and library.origin is not None:
        folders.insert(1, str(Path(library.origin).resolve().parents[1]))
    return {**os.environ, **changes, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
