"""Newton-Schulz of many matrices at once, with results that do not depend on the company.

Small matrices cost launches, not arithmetic, so matrices of one shape run together. What is
computed for a matrix must not depend on what else its owner happens to hold, to the last bit: then
the number of ranks, and a resume on another number, leave the training as it was. Hence a batch has
a fixed size, a pure function of the shape and the kind of device, and what is missing is zeros.

Letters: ``B x M x N`` a stack, ``m = min(M, N)``, ``n = max(M, N)``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dmuon.newton_schulz import Coefficients, default_dtype, newton_schulz, newton_schulz_flops

# Below this many operations, a matrix costs its launches more than its arithmetic. About 15 calls:
# - on a CPU 110 us (measured, one thread: 8 of 24x24 take 1.6 times as long as one), in which a
#   core does 2^23 operations;
# - on accelerators 75 us, in which bfloat16 units do 2^35 to 2^36; 1024x1024 needs 2^35.
_LAUNCHES_IN_OPERATIONS = {"cpu": 2**23}
_ACCELERATOR_LAUNCHES_IN_OPERATIONS = 2**36
_MOST_IN_A_BATCH = {"cpu": 8}  # beyond, padding costs a small model more than it gains
_MOST_ON_ACCELERATOR = 16

# Matrix products round by the alignment of their operands (seen with MKL: equal 9x13 matrices
# differ by their place in a batch); with sides of 8 all matrices of a batch are aligned alike.
_SIDE = 8


def batch_size(rows: int, columns: int, device_type: str) -> int:
    """How many ``rows x columns`` matrices run together; a power of two, 1 for large ones.

    A batch with one matrix and padding costs at most about twice what the matrix costs alone, and a
    full one saves its launches: all that its arithmetic may take is what the launches of one take.
    """
    budget = _LAUNCHES_IN_OPERATIONS.get(device_type, _ACCELERATOR_LAUNCHES_IN_OPERATIONS)
    most = _MOST_IN_A_BATCH.get(device_type, _MOST_ON_ACCELERATOR)
    fitting = min(most, budget // newton_schulz_flops(rows, columns))
    return 1 << max(0, fitting.bit_length() - 1)


@torch.no_grad()
def orthogonalize_all(
    stacks: Sequence[torch.Tensor],
    *,
    steps: int,
    coefficients: Coefficients,
    dtype: torch.dtype | None,
    eps: float,
) -> list[torch.Tensor]:
    """Orthogonalise every matrix of every stack on its own.

    The result of a matrix is the same to the last bit whatever else is in ``stacks``, in any order,
    on its own or in a stack. That of a transposed matrix, if it is not square, is the transpose.

    Args:
        stacks: each ``(B, M, N)``; they may be views, and differ in shape and ``B``.
        steps: see `newton_schulz`, as all that follow.
        coefficients: one ``(a, b, c)`` for all steps, or one a step.
        dtype: of the arithmetic; None: the device's default.
        eps: lower bound of the norm that is divided by.

    Returns:
        For each stack a new ``(B, M, N)`` in the dtype of the arithmetic.

    Raises:
        ValueError: for a stack that is not three-dimensional, or as `newton_schulz`.
    """
    for stack in stacks:
        if stack.ndim != 3 or 0 in stack.shape:
            raise ValueError(
                f"orthogonalize_all needs stacks (B, M, N) with at least one matrix each, "
                f"got {tuple(stack.shape)}; give a single matrix as matrix.unsqueeze(0)"
            )
    results = [
        torch.empty(stack.shape, dtype=dtype or default_dtype(stack.device), device=stack.device)
        for stack in stacks
    ]
    for batch in _batches(stacks, results):
        packed = batch.pack()
        orthogonal = newton_schulz(
            packed, steps=steps, coefficients=coefficients, dtype=packed.dtype, eps=eps
        )
        batch.unpack(orthogonal)
    return results


@dataclass(frozen=True)
class _Batch:
    """Matrices that run together, lying down (``m x n``), and where their results go."""

    matrices: list[torch.Tensor]
    results: list[torch.Tensor]
    size: int

    def pack(self) -> torch.Tensor:
        """``(size, m, n)``: the matrices, then zeros; sides rounded up if there are several."""
        if self.size == 1:
            return self.matrices[0].to(self.results[0].dtype).unsqueeze(0)
        m, n = (-(-side // _SIDE) * _SIDE for side in self.matrices[0].shape)
        packed = self.results[0].new_zeros((self.size, m, n))
        for place, matrix in zip(packed, self.matrices, strict=False):
            place[: matrix.size(0), : matrix.size(1)].copy_(matrix)
        return packed

    def unpack(self, orthogonal: torch.Tensor) -> None:
        for place, result in zip(orthogonal, self.results, strict=False):
            result.copy_(place[: result.size(0), : result.size(1)])


def _batches(stacks: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> Iterator[_Batch]:
    alike: dict[tuple[int, int, torch.device], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for stack, result in zip(stacks, results, strict=True):
        if stack.size(1) > stack.size(2):
            stack, result = stack.mT, result.mT
        key = (stack.size(1), stack.size(2), stack.device)
        alike.setdefault(key, []).extend(zip(stack, result, strict=True))
    for (m, n, device), pairs in alike.items():
        size = batch_size(m, n, device.type)
        for start in range(0, len(pairs), size):
            chosen = pairs[start : start + size]
            yield _Batch([pair[0] for pair in chosen], [pair[1] for pair in chosen], size)
