"""Where matplotlib keeps its list of fonts, which it would else put into the home folder."""

import os
from collections.abc import MutableMapping
from pathlib import Path


def keep_in(folder: Path, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let it be below ``folder``, unless the user has said where; before matplotlib is imported.

    Args:
        folder: Of a run's own.
        environment: That matplotlib will see.
    """
    environment.setdefault("MPLCONFIGDIR", str(folder / "matplotlib"))
