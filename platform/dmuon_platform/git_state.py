"""Which code a job runs: the commit of the folder it is launched or was submitted from."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

SUBMITTED_VARIABLE = "DMUON_SUBMITTED_GIT_STATE"
"""Set by ``dmuon submit``, since the copy that a cluster gets has no ``.git``. Only told on."""

ANSWER_S = 5.0


def git_state(folder: Path) -> dict[str, Any]:
    """Return commit, branch and whether files differ from it; empty outside of a repository.

    In a submitted job these are of the folder that it was submitted from.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
        return done.stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "branch": git("rev-parse", "--abbrev-ref", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return _submitted()


def _submitted() -> dict[str, Any]:
    try:
        state = json.loads(os.environ.get(SUBMITTED_VARIABLE, "{}"))
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}
