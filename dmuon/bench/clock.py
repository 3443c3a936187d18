"""Timing the phases of a step on the host or on an accelerator, without waiting in between."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch


class Laps(NamedTuple):
    """Seconds of the phases of one step on one rank; waiting for other ranks included."""

    forward: float
    backward: float
    optimizer: float

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return sum(self)


class Clock(Protocol):
    """Marks the start of a step and the end of each phase."""

    def mark(self) -> None:
        """Note this moment."""

    def laps(self) -> Laps:
        """The times between the four marks of one step, which are then forgotten."""


class HostClock:
    """For devices whose work is done when the call returns.

    Args:
        seconds: what the time is. ``time.process_time``: that of the CPU in all threads of this
            process, which waiting does not add to.
    """

    def __init__(self, seconds: Callable[[], float] = time.perf_counter) -> None:
        self._seconds = seconds
        self._marks: list[float] = []

    def mark(self) -> None:
        """Note this moment."""
        self._marks.append(self._seconds())

    def laps(self) -> Laps:
        """The times between the four marks."""
        first, second, third, last = self._marks
        self._marks = []
        return Laps(second - first, third - second, last - third)


class DeviceClock:
    """For devices that run behind the host: events on the stream the model computes on."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note the moment the device gets here; before the first one it catches up."""
        if not self._marks:
            self._module.synchronize()
        event = self._module.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def laps(self) -> Laps:
        """Wait for the device, then the times between the four marks."""
        self._module.synchronize()
        marks, self._marks = self._marks, []
        return Laps(*(start.elapsed_time(end) / 1000 for start, end in pairwise(marks)))


def clock_for(device: torch.device) -> Clock:
    """The clock that tells the truth on ``device``."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)
