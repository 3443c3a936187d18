"""Products of which one triangle is computed are right in every element."""

import pytest
import torch

from dmuon.symmetric_product import gram_matrix, symmetric_sum

SIDES = [1, 64, 191, 192, 200, 511, 513, 1000]


def _close(found: torch.Tensor, exact: torch.Tensor) -> bool:
    tolerance = 1e-2 if found.dtype == torch.bfloat16 else 1e-5
    return bool((found.double() - exact).abs().max() <= tolerance * exact.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", SIDES)
def test_gram_matrix_is_the_product_in_float64(side: int, dtype: torch.dtype) -> None:
    X = torch.randn(2, side, 300, dtype=dtype)
    R = gram_matrix(X)
    assert _close(R, X.double() @ X.double().mT)


@pytest.mark.parametrize("side", SIDES)
def test_sum_with_a_product_is_that_in_float64(side: int) -> None:
    R = gram_matrix(torch.randn(2, side, 300))
    B = symmetric_sum(R, R, R, beta=-2.5, alpha=0.5)
    assert _close(B, -2.5 * R.double() + 0.5 * R.double() @ R.double())
    both = symmetric_sum(R, R, B, beta=3.0)  # of two that are not the same
    assert _close(both, 3 * R.double() + R.double() @ B.double())


def test_each_matrix_of_a_batch_is_as_alone() -> None:
    X = torch.randn(3, 256, 256)
    R = gram_matrix(X)
    B = symmetric_sum(R, R, R, beta=1.0)
    for one, R_alone, B_alone in zip(X, R, B, strict=True):
        assert torch.equal(R_alone, gram_matrix(one[None])[0])
        assert torch.equal(B_alone, symmetric_sum(*[R_alone[None]] * 3, beta=1.0)[0])


def test_the_lower_triangle_alone_is_computed() -> None:
    R = gram_matrix(torch.randn(1, 512, 512))
    with torch.profiler.profile(with_flops=True, record_shapes=True) as profile:
        symmetric_sum(R, R, R, beta=1.0)
    flops = sum(event.flops for event in profile.key_averages())
    assert flops < 0.6 * 2 * 512**3
