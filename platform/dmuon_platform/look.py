"""One look at many things of which few are worth reading."""

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


class Look(Generic[T]):
    """Reads each thing once, when it is first asked for.

    Args:
        read: Returns what is at a path, None when nothing good is.
    """

    def __init__(self, read: Callable[[Path], T | None]) -> None:
        self._read = read
        self._seen: dict[Path, T | None] = {}

    def __call__(self, path: Path) -> T | None:
        """Return what is at ``path``."""
        if path not in self._seen:
            self._seen[path] = self._read(path)
        return self._seen[path]

    def is_good(self, path: Path) -> bool:
        """Return whether something good is at ``path``."""
        return self(path) is not None

    def found(self) -> list[T]:
        """Return all that was good so far."""
        return [each for each in self._seen.values() if each is not None]
