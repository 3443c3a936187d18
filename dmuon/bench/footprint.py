"""Memory of one contender while others are on the device too."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Footprint:
    """What one contender holds between its turns, and at most within them.

    Attributes:
        peak: the most bytes allocated for it in a ``turn``; None on CPU, where nobody counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._held = 0
        self.peak: int | None = None if self._module is None else 0

    @contextmanager
    def building(self) -> Iterator[None]:
        """What stays allocated belongs to this contender."""
        if self._module is None:
            yield
            return
        before = self._module.memory_allocated()
        yield
        self._held += self._module.memory_allocated() - before

    @contextmanager
    def turn(self) -> Iterator[None]:
        """As ``building``; what is allocated on the way counts for the peak."""
        if self._module is None or self.peak is None:
            yield
            return
        held, before = self._held, self._module.memory_allocated()
        self._module.reset_peak_memory_stats()
        with self.building():
            yield
        self.peak = max(self.peak, held + self._module.max_memory_allocated() - before)
