"""Patience with programs that are not under test: Ray takes ports that were free a moment ago."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TRIES = 3


def persist(start: Callable[[], T]) -> T:
    """Return what ``start`` returns; it may fail twice, if it leaves nothing behind."""
    for _ in range(TRIES - 1):
        try:
            return start()
        except Exception as error:  # whatever went wrong, the last try shows it
            print(f"will be tried again: {error}")
    return start()
