"""Run a job file from a clone: ``python jobs/train.py jobs/NAME.toml [--set key=value ...]``.

The same as ``dmuon run``, for where nothing but the dependencies is installed, such as
``ray job submit --working-dir . -- python jobs/train.py jobs/NAME.toml``.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [str(ROOT / "platform"), str(ROOT)]


def main() -> int:
    """Make the packages of this clone importable, here and in the workers; then run the job."""
    sys.path[:0] = SOURCES
    # For the processes of a local Ray. On a cluster that is already there, `launch` sends them.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [*SOURCES, os.environ.get("PYTHONPATH")])
    )
    from dmuon_platform.cli import main as dmuon

    return dmuon(["run", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
