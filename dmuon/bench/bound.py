"""How long the matrix products of Newton-Schulz take alone: what an optimizer step waits for."""

import time
from collections import Counter
from collections.abc import Callable, Iterable

import torch

from dmuon.batching import batch_size
from dmuon.newton_schulz import Product, default_dtype, newton_schulz_products

_SAMPLES = 3
_CALLS = {"cpu": 4}  # in a sample
_CALLS_ON_ACCELERATOR = 50
_HEAD_START = 4  # products of _HEAD_START_SIDE: a few milliseconds, in which the host gets ahead
_HEAD_START_SIDE = 8192


def product_seconds(
    shapes: Iterable[tuple[int, int]], device: torch.device, dtype: torch.dtype
) -> float:
    """Seconds of the products of one step's Newton-Schulz of matrices of these shapes.

    Each kind of product is timed alone, as plain ``torch.bmm`` in ``dtype`` and the batches that
    the optimizer uses; a batch that is not full counts in part. On CPUs the optimizer itself
    computes one triangle of most of them, so it may take less.
    """
    seconds = 0.0
    for (m, n), count in Counter((min(shape), max(shape)) for shape in shapes).items():
        size = batch_size(m, n, device.type)
        for product, times in newton_schulz_products(m, n).items():
            seconds += count * times * _batch_seconds(size, product, dtype, device) / size
    return seconds


def _batch_seconds(size: int, product: Product, dtype: torch.dtype, device: torch.device) -> float:
    rows, inner, columns = product
    left = torch.randn(size, rows, inner, dtype=dtype, device=device)
    right = torch.randn(size, inner, columns, dtype=dtype, device=device)
    out = torch.bmm(left, right)
    seconds = _host_seconds if device.type == "cpu" else _device_seconds
    return min(seconds(lambda: torch.bmm(left, right, out=out), device) for _ in range(_SAMPLES))


def _host_seconds(call: Callable[[], object], device: torch.device) -> float:
    num_calls = _CALLS[device.type]
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - start) / num_calls


def _device_seconds(call: Callable[[], object], device: torch.device) -> float:
    """The device is busy while the host launches, so that launches are not what is timed."""
    module = torch.get_device_module(device)
    start, end = (module.Event(enable_timing=True) for _ in range(2))
    square = torch.randn(
        _HEAD_START_SIDE, _HEAD_START_SIDE, dtype=default_dtype(device), device=device
    )
    for _ in range(_HEAD_START):
        torch.mm(square, square)
    start.record()
    for _ in range(_CALLS_ON_ACCELERATOR):
        call()
    end.record()
    module.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1000 / _CALLS_ON_ACCELERATOR
