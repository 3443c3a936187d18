"""How long the matrix products of Newton-Schulz take alone: what an optimizer step waits for."""

import time
from collections import Counter
from collections.abc import Callable, Iterable

import torch

from dmuon.batching import batch_size
from dmuon.newton_schulz import Product, default_dtype, newton_schulz_products

_SAMPLES = 3
_CALLS_ON_HOST = 4  # in a sample
_CALLS_ON_ACCELERATOR = 50
_HEAD_START = 4  # products of _HEAD_START_SIDE: a few milliseconds, in which the host gets ahead
_HEAD_START_SIDE = 8192


def product_seconds(
    shapes: Iterable[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
    crowding: float = 1.0,
) -> float:
    """Seconds of the products of one step's Newton-Schulz of matrices of these shapes.

    Each kind of product is timed alone, as plain ``torch.bmm`` in ``dtype`` and the batches that
    the optimizer uses; a batch that is not full counts in part. On CPUs the optimizer itself
    computes one triangle of most of them, so it may take less.

    Args:
        shapes: of the matrices.
        device: where.
        dtype: of the arithmetic.
        crowding: threads of all ranks over the cores that they have; above 1 ranks take turns, so
            that each is that many times as long about its share.
    """
    seconds = 0.0
    for (m, n), count in Counter((min(shape), max(shape)) for shape in shapes).items():
        size = batch_size(m, n, device.type)
        for product, times in newton_schulz_products(m, n).items():
            taken = _batch_seconds(size, product, dtype, device, crowding)
            seconds += count * times * taken / size
    return seconds


def _batch_seconds(
    size: int, product: Product, dtype: torch.dtype, device: torch.device, crowding: float
) -> float:
    rows, inner, columns = product
    left = torch.randn(size, rows, inner, dtype=dtype, device=device)
    right = torch.randn(size, inner, columns, dtype=dtype, device=device)
    out = torch.bmm(left, right)

    def seconds() -> float:
        def call() -> torch.Tensor:
            return torch.bmm(left, right, out=out)

        is_on_host = device.type == "cpu"
        return _host_seconds(call, crowding) if is_on_host else _device_seconds(call, device)

    return min(seconds() for _ in range(_SAMPLES))


def _host_seconds(call: Callable[[], object], crowding: float) -> float:
    """By the clock; where ranks take turns by CPU time, for a short call may meet no other."""
    clock, factor = time.perf_counter, 1.0
    if crowding > 1:
        clock, factor = time.process_time, crowding / torch.get_num_threads()
    start = clock()
    for _ in range(_CALLS_ON_HOST):
        call()
    return factor * (clock() - start) / _CALLS_ON_HOST


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
