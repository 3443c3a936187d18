"""Python's search for garbage, which goes through all of a large model time and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let it rest: it is over a quarter of the time that a plan of 100,000 matrices takes.

    What a plan makes has no cycles, so there is nothing for it to find.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
