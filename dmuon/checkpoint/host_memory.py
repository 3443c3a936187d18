"""Host memory that the system has back as soon as nobody looks at it any more.

An allocator would keep what a checkpoint needs for seconds, scattered over a heap that training
goes on using for weeks.
"""

import math
import mmap
from collections.abc import Sequence

import torch

_LARGE_BYTES = 2**20


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in host memory, taken as it is filled and given back when the tensor goes."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _LARGE_BYTES:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer faults at the first touch
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
