"""Warnings as a person at a terminal reads them: the sentence, and nothing of the source."""

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGES = ("dmuon", "dmuon_platform")


@contextmanager
def sentences() -> Iterator[None]:
    """Show our own warnings as one line; those of other packages name their place as always."""
    usual = warnings.formatwarning

    def shown(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if issubclass(category, UserWarning) and _is_ours(filename):
            return f"dmuon: {message}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = shown
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _is_ours(filename: str) -> bool:
    specs = [importlib.util.find_spec(name) for name in PACKAGES]  # imports neither
    folders = [Path(spec.origin).parent for spec in specs if spec and spec.origin]
    return any(Path(filename).is_relative_to(folder) for folder in folders)
