"""Memory of one contender on a CPU, where no allocator keeps the count: torch's profiler does."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from torch.autograd.profiler import profile

_ALLOCATION = "[memory]"


class HostFootprint:
    """As ``DeviceFootprint``, of tensors: what other allocators hold (gloo's) is not seen.

    Watching makes a step slower, so timed turns are not watched; what a contender holds must not
    change in them.

    Attributes:
        peak: the most bytes of tensors allocated for it in an untimed ``turn``.
    """

    def __init__(self) -> None:
        self._held = 0
        self.peak = 0

    @contextmanager
    def building(self) -> Iterator[None]:
        """What stays allocated belongs to this contender."""
        with profile(profile_memory=True) as profiler:
            yield
        self._held += sum(_changes(profiler))

    @contextmanager
    def turn(self, *, is_timed: bool) -> Iterator[None]:
        """As ``building``; what is allocated on the way counts for the peak."""
        if is_timed:
            yield
            return
        with profile(profile_memory=True) as profiler:
            yield
        totals = list(accumulate(_changes(profiler), initial=self._held))
        self._held = totals[-1]
        self.peak = max(self.peak, *totals)


def _changes(profiler: profile) -> list[int]:
    """Bytes allocated, and as negative numbers freed, in the order of time."""
    assert profiler.kineto_results is not None
    found: list[Any] = profiler.kineto_results.events()  # torch's stub lacks `nbytes`
    events = [event for event in found if event.name() == _ALLOCATION]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
