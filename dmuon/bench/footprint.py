"""Memory of one contender while others are on the device too."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from dmuon.bench.host_footprint import HostFootprint


class Footprint(Protocol):
    """What one contender holds between its turns, and at most within them.

    Attributes:
        peak: the most bytes allocated for it in a ``turn``.
    """

    peak: int

    def building(self) -> AbstractContextManager[None]:
        """What stays allocated belongs to this contender."""

    def turn(self, *, is_timed: bool) -> AbstractContextManager[None]:
        """As ``building``; what is allocated on the way counts for the peak."""


class DeviceFootprint:
    """Of the memory of an accelerator, whose allocator counts.

    Attributes:
        peak: the most bytes allocated for it in a ``turn``.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._held = 0
        self.peak = 0

    @contextmanager
    def building(self) -> Iterator[None]:
        """What stays allocated belongs to this contender."""
        before = self._module.memory_allocated()
        yield
        self._held += self._module.memory_allocated() - before

    @contextmanager
    def turn(self, *, is_timed: bool) -> Iterator[None]:
        """As ``building``; what is allocated on the way counts for the peak."""
        held, before = self._held, self._module.memory_allocated()
        self._module.reset_peak_memory_stats()
        with self.building():
            yield
        self.peak = max(self.peak, held + self._module.max_memory_allocated() - before)


def footprint_on(device: torch.device) -> Footprint:
    """What counts on ``device``."""
    return HostFootprint() if device.type == "cpu" else DeviceFootprint(device)
