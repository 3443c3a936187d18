"""Memory of one contender on a CPU, where no allocator keeps the count: torch's profiler does."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._profiler import _EventType
from torch.autograd.profiler import profile


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
        with self._watched():
            yield

    @contextmanager
    def turn(self, *, is_timed: bool) -> Iterator[None]:
        """As ``building``; what is allocated on the way counts for the peak."""
        if is_timed:
            yield
            return
        with self._watched() as totals:
            yield
        self.peak = max(self.peak, *totals)

    @contextmanager
    def _watched(self) -> Iterator[list[int]]:
        """What this contender holds from moment to moment, known at the end."""
        totals = [self._held]
        with profile(profile_memory=True) as profiler:
            yield totals
        for address, size in _events(profiler):
            if size > 0:
                _drop(_overlapping(address, address + size))
                _blocks[address] = size, self
                insort(_addresses, address)
                self._held += size
            elif address in _blocks:
                _drop([address])
            totals.append(self._held)


# All blocks that were seen to be allocated and not to be freed. What gloo's threads free is not
# seen; such a block is dropped when its memory is allocated again. Until then it counts: the same
# peak of fully_shard came out up to a tenth larger in some steps, which sums would add up for ever.
_blocks: dict[int, tuple[int, HostFootprint]] = {}
_addresses: list[int] = []  # in order


def _overlapping(begin: int, end: int) -> list[int]:
    """Addresses of known blocks that overlap the bytes from ``begin`` to ``end``."""
    first, last = bisect_left(_addresses, begin), bisect_left(_addresses, end)
    if first and _addresses[first - 1] + _blocks[_addresses[first - 1]][0] > begin:
        first -= 1
    return _addresses[first:last]


def _drop(addresses: list[int]) -> None:
    for address in addresses:
        size, owner = _blocks.pop(address)
        owner._held -= size
        del _addresses[bisect_left(_addresses, address)]


def _events(profiler: profile) -> list[tuple[int, int]]:
    """Address and size of each block allocated, a negative size of each one freed, in time."""
    assert profiler.kineto_results is not None
    found: list[tuple[int, int, int]] = []
    waiting: list[Any] = list(profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        kind, details = event.typed
        if kind == _EventType.Allocation:
            found.append((event.start_time_ns, details.ptr, details.alloc_size))
    return [(address, size) for _, address, size in sorted(found, key=lambda each: each[0])]
