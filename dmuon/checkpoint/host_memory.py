"""Host memory that the system has back as soon as nobody looks at it any more.

An allocator would keep what a checkpoint needs for seconds, scattered over a heap that training
goes on using for weeks.
"""

import math
import mmap
from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch.distributed.tensor import DTensor

_LARGE_BYTES = 2**20
_mapped: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()
"""By address; as long as a tensor lies there."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in host memory, taken as it is filled and given back when the tensor goes."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _LARGE_BYTES:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = _map(num_bytes)
    tensor = torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
    _mapped[tensor.data_ptr()] = memory
    return tensor


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As ``torch.empty``, for what is filled at once and stays: it never is given back in part.

    In host memory a large one is filled several times as fast as one of the allocator, most of
    whose time goes into faults of small pages.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LARGE_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.frombuffer(_map(num_bytes), dtype=dtype).view(tuple(shape))


def fresh_like(param: torch.Tensor) -> torch.Tensor:
    """As ``torch.empty_like``, in memory of `fresh` where it is dense and row-major."""
    if isinstance(param, DTensor):
        return DTensor.from_local(
            fresh_like(param.to_local()),
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
    if not param.is_contiguous():
        return torch.empty_like(param)
    return fresh(param.shape, param.dtype, param.device)


def _map(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer faults at the first touch
    return memory


def give_back(tensor: torch.Tensor, start: int, end: int) -> None:
    """Let go of bytes of a tensor that nobody reads again, nor those before them.

    Does nothing for a tensor that is not of `empty`, or a small one.
    """
    memory = _mapped.get(tensor.data_ptr())
    if memory is not None and hasattr(mmap, "MADV_DONTNEED"):
        first, last = (at // mmap.PAGESIZE * mmap.PAGESIZE for at in (start, end))
        if first < last:
            memory.madvise(mmap.MADV_DONTNEED, first, last - first)
