"""What of the current folder a Ray cluster gets, by the rules that Ray itself goes by."""

import logging
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from ray._private.ray_constants import RAY_RUNTIME_ENV_IGNORE_GITIGNORE
from ray._private.runtime_env import packaging  # no public call tells what is uploaded

EXCLUDES = [".git", ".venv", "/runs"]
"""What is never uploaded, beside what ``.gitignore`` and ``.rayignore`` name."""

Rule = Callable[[Path], bool]

_CACHE = "__pycache__"
_quiet = logging.getLogger(__name__)
"""Ray tells every ignore file that it reads, once a path."""
_quiet.setLevel(logging.WARNING)


def find_missing(paths: list[Path], folder: Path) -> Path | None:
    """Return the first file that the cluster would not get.

    Args:
        paths: Files, or folders of which every file counts but hidden ones. Those outside of
            ``folder`` are taken to be on the cluster.
        folder: That is uploaded.
    """
    rules_in = cache(_rules_in)  # many files lie in few folders
    for path in paths:
        for file in _files_of(path):
            if file.is_relative_to(folder) and _is_left_out(file, folder, rules_in):
                return file
    return None


def _files_of(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for file in sorted(path.rglob("*")):
        parts = file.relative_to(path).parts
        if file.is_file() and not any(part.startswith(".") or part == _CACHE for part in parts):
            yield file


def _rules_in(folder: Path) -> list[Rule]:
    include = os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    found: list[Rule] = packaging.get_excludes_from_ignore_files(folder, include, logger=_quiet)
    return found


def _is_left_out(file: Path, folder: Path, rules_in: Callable[[Path], list[Rule]]) -> bool:
    """Whether an ignore file of a folder above, or `EXCLUDES`, names it or a folder above it."""
    rules: list[Rule] = [packaging._get_excludes(folder, EXCLUDES)]
    for part in [*reversed(file.relative_to(folder).parents), file]:
        step = folder / part
        rules += rules_in(step)
        if any(rule(step) for rule in rules):
            return True
    return False
