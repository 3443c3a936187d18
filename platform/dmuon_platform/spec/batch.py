"""How a global batch divides into micro-batches of the workers."""

import math
from collections.abc import Sequence

from dmuon_platform.spec.model import either_multiple
from dmuon_platform.spec.problem import Problem
from dmuon_platform.spec.train import TrainSpec


def accumulation(train: TrainSpec, num_workers: int) -> int:
    """Return how many micro-batches each worker does in one step.

    Raises:
        SpecError: The global batch does not divide.
    """
    problem = problem_with_batch(train, [num_workers])
    if problem is not None:
        raise problem.as_error()
    return train.global_batch_size // (train.micro_batch_size * num_workers)


def problem_with_batch(train: TrainSpec, possible_workers: Sequence[int]) -> Problem | None:
    """Return why the global batch does not divide for each number of workers, if it does not."""
    batch, micro = train.global_batch_size, train.micro_batch_size
    unit = micro * math.lcm(*possible_workers)
    if batch % unit == 0:
        return None
    *fewer, most = map(str, possible_workers)
    workers = f"{', '.join(fewer)} or {most}" if fewer else most
    way_out = f"nearest good values: {either_multiple(batch, unit)}"
    other = _good_micro_batch(train, possible_workers)
    if other is not None:
        way_out += f", or micro_batch_size = {other}"
    if len(possible_workers) > 1:
        way_out += ", or a narrower range of resources.workers"
    return Problem(
        "train.global_batch_size",
        f"{batch} sequences do not divide into {workers} workers x micro-batches of {micro}",
        way_out,
        ("train.micro_batch_size", "resources.workers"),
    )


def _good_micro_batch(train: TrainSpec, possible_workers: Sequence[int]) -> int | None:
    """Return the largest micro-batch, up to the one given, that would divide; None for none."""
    share, rest = divmod(train.global_batch_size, math.lcm(*possible_workers))
    if rest:
        return None
    largest = min(train.micro_batch_size, share)
    return next(size for size in range(largest, 0, -1) if share % size == 0)
