"""Newton-Schulz of many matrices at once, with results that do not depend on the company.

Small matrices do not fill a device, so matrices of one shape run together. What is computed for a
matrix must not depend on what else its owner happens to hold, to the last bit: then the number of
ranks, and a resume on another number, leave the training as it was. Hence a batch has a fixed size,
a pure function of the shape and the kind of device, and what is missing is zeros.

Letters: ``B x M x N`` a stack, ``m = min(M, N)``, ``n = max(M, N)``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from dmuon.newton_schulz import Triple, newton_schulz_, newton_schulz_flops

# Below this many operations, running a matrix alone wastes the device:
# - on a CPU, on about 15 calls that take 110 us (measured, one thread: 8 of 24x24 take 1.6 times as
#   long as one), in which a core does 2^23 operations;
# - on accelerators, on idle multiprocessors: bfloat16 products of an H200 run, in 10^12 operations
#   a second, at 340 in fours and 540 in sixteens of 768x768, at 380 in twos and 640 in eights of
#   768x2048, at 640 for one 2048x2048. A batch of one matrix and padding takes under 0.5 ms.
_WORTH_A_BATCH = {"cpu": 2**23}
_WORTH_A_BATCH_ON_ACCELERATOR = 2**38
_MOST_IN_A_BATCH = {"cpu": 8}  # beyond, padding costs a small model more than it gains
_MOST_ON_ACCELERATOR = 16

# Matrix products round by the alignment of their operands (seen with MKL: equal 9x13 matrices
# differ by their place in a batch); with sides of 8 all matrices of a batch are aligned alike.
_SIDE = 8


class Stack(Protocol):
    """Matrices of one shape that are to be orthogonalised, and what becomes of the results."""

    @property
    def shape(self) -> torch.Size:
        """``(B, M, N)``."""

    def split_at(self, count: int) -> tuple[Self, Self]:
        """The first ``count`` matrices, and the others."""

    def write_to(self, room_BMN: torch.Tensor) -> None:
        """Put the matrices there, in the dtype that it has. Called once, before ``take``."""

    def take(self, orthogonal_BMN: torch.Tensor) -> None:
        """Use the results; they are overwritten afterwards."""


class Workspace:
    """Where batches are orthogonalised, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def room(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """At least ``numel`` elements, not initialised."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def orthogonalize_(
        self, batch_Bmn: torch.Tensor, schedule: tuple[Triple, ...], eps: float
    ) -> None:
        """`newton_schulz_` of a batch that lies at the start of the last ``room``."""
        newton_schulz_(batch_Bmn, schedule, eps)


def batch_size(rows: int, columns: int, device_type: str) -> int:
    """How many ``rows x columns`` matrices run together; a power of two, 1 for large ones."""
    budget = _WORTH_A_BATCH.get(device_type, _WORTH_A_BATCH_ON_ACCELERATOR)
    most = _MOST_IN_A_BATCH.get(device_type, _MOST_ON_ACCELERATOR)
    fitting = min(most, budget // newton_schulz_flops(rows, columns))
    return 1 << max(0, fitting.bit_length() - 1)


@torch.no_grad()
def orthogonalize_all(
    stacks: Sequence[Stack],
    workspace: Workspace,
    schedule: Sequence[Triple],
    *,
    dtype: torch.dtype,
    eps: float,
) -> None:
    """Orthogonalise every matrix of every stack on its own.

    The result of a matrix is the same to the last bit whatever else is in ``stacks``, in any order,
    on its own or in a stack. Matrices that stand run as they lie in memory, for a transposing copy
    takes several times as long as a plain one.

    Args:
        stacks: on the device of ``workspace``; they may differ in shape.
        workspace: where it is done.
        schedule: ``(a, b, c)`` of each Newton-Schulz step.
        dtype: of the arithmetic.
        eps: lower bound of the norm that is divided by.
    """
    batches = list(_batches(stacks, workspace.device.type))
    if not batches:
        return
    room = workspace.room(max(batch.shape.numel() for batch in batches), dtype)
    for batch in batches:
        room_BMN = room[: batch.shape.numel()].view(batch.shape)
        places = batch.places(room_BMN)
        for stack, place in zip(batch.stacks, places, strict=True):
            stack.write_to(place)
        _, M, N = room_BMN.shape
        room_Bmn = room_BMN.mT if M > N else room_BMN
        workspace.orthogonalize_(room_Bmn, tuple(schedule), eps)
        for stack, place in zip(batch.stacks, places, strict=True):
            stack.take(place)


@dataclass(frozen=True)
class _Batch:
    """Stacks that run together, all ``(..., M, N)``, and the shape of the room they run in."""

    stacks: list[Stack]
    shape: torch.Size

    def places(self, room_BMN: torch.Tensor) -> Sequence[torch.Tensor]:
        """Where each stack belongs; all the rest becomes zeros."""
        _, M, N = self.stacks[0].shape
        counts = [stack.shape[0] for stack in self.stacks]
        if room_BMN.shape[1:] != (M, N):
            room_BMN.zero_()
        elif sum(counts) < len(room_BMN):
            room_BMN[sum(counts) :].zero_()
        return room_BMN[: sum(counts), :M, :N].split(counts)


def _batches(stacks: Sequence[Stack], device_type: str) -> Iterator[_Batch]:
    alike: dict[tuple[int, int], list[Stack]] = {}
    for stack in stacks:
        _, M, N = stack.shape
        alike.setdefault((M, N), []).append(stack)
    for (M, N), waiting in alike.items():
        size = batch_size(M, N, device_type)
        # alone, nothing can be aligned otherwise
        sides = (M, N) if size == 1 else (-(-side // _SIDE) * _SIDE for side in (M, N))
        shape = torch.Size((size, *sides))
        for chosen in _portions(waiting, size):
            yield _Batch(chosen, shape)


def _portions(stacks: Sequence[Stack], size: int) -> Iterator[list[Stack]]:
    """``stacks`` in order, cut into portions of ``size`` matrices; the last may have fewer."""
    portion: list[Stack] = []
    free = size
    for stack in stacks:
        rest = stack
        while rest.shape[0] >= free:
            whole = rest.shape[0] == free
            first, rest = (rest, rest) if whole else rest.split_at(free)
            yield [*portion, first]
            portion, free = [], size
            if whole:
                break
        else:
            portion.append(rest)
            free -= rest.shape[0]
    if portion:
        yield portion
