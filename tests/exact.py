"""How far training is from the float64 answer, as a part of what training changed.

Float32 noise of a dedicated matrix, measured on the tiny model over 50 steps against float64: one
process has at most 1.0e-5 of the change of a matrix after the first step and 4e-6 later, with the
batch in one piece or in parts; with everything but Newton-Schulz in float64 it is still 6e-6, as
that iteration lifts singular values of 1e-3, and their rounding with them, to 1. It does not grow
with steps. Symmetric parameters are near 1 and move by 1e-3 a step, so that float32 alone rounds
their change by 6e-8 / 1e-3 = 6e-5 of it.
"""

from collections.abc import Mapping

import torch

MATRIX, SYMMETRIC = 2e-5, 1e-4

State = Mapping[str, torch.Tensor]


def assert_follows(state: State, answer: State, start: State, matrix: float = MATRIX) -> None:
    """``|(W - W0) - (W* - W0)| <= bound * |W* - W0|``, parameter by parameter.

    Args:
        state: what was trained, ``W``.
        answer: by one process, in float64, ``W*``.
        start: of both, ``W0``.
        matrix: the bound for dedicated matrices.
    """
    assert list(state) == list(answer) == list(start)
    for name, value in answer.items():
        change = (value.double() - start[name].double()).norm()
        off = (state[name].double() - value.double()).norm()
        bound = matrix if "proj" in name and value.ndim == 2 else max(matrix, SYMMETRIC)
        assert off <= bound * change, f"{name}: changed by {change:.3g}, off by {off / change:.2g}"


def assert_identical(left: object, right: object, where: str = "state") -> None:
    """Bit by bit, through dictionaries and lists."""
    assert type(left) is type(right), where
    if isinstance(left, dict) and isinstance(right, dict):
        assert list(left) == list(right), where
        for key in left:
            assert_identical(left[key], right[key], f"{where}[{key!r}]")
    elif isinstance(left, list) and isinstance(right, list):
        assert len(left) == len(right), where
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_identical(*pair, f"{where}[{index}]")
    elif isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        assert torch.equal(left, right), where
    else:
        assert left == right, where
