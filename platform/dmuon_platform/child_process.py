"""Python processes of ours beside the command's own."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]


def command_of(module: str, *arguments: str) -> Sequence[str]:
    """Return the command that runs one of our modules."""
    return [sys.executable, "-m", module, *arguments]


def environment(**changes: str) -> dict[str, str]:
    """Return our environment, in which our packages are found also when they are only files."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **changes, "PYTHONPATH": path}
