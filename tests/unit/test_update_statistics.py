"""The numbers that tell an orthogonal update from another: of matrices whose answer is known."""

import math

import pytest
import torch

import dmuon
from dmuon.update_statistics import EXACT_SIDE, measure


def matrix_with(sigma: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    torch.manual_seed(0)
    left = torch.linalg.qr(torch.randn(rows, len(sigma), dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(columns, len(sigma), dtype=torch.float64))[0]
    return left * sigma @ right.T


@pytest.mark.parametrize("side", [24, EXACT_SIDE + 64])
@pytest.mark.parametrize("is_tall", [False, True])
def test_known_singular_values_give_known_numbers(side: int, is_tall: bool) -> None:
    sigma = torch.linspace(0.7, 1.2, side, dtype=torch.float64)
    sigma[: side // 4] = 0  # directions without any gradient
    U = matrix_with(sigma, side, side + 40)
    U = U.T if is_tall else U
    W = torch.full(U.shape, 0.5)
    (row,) = measure(W[None], U[None].float(), rate=-0.1).tolist()
    is_exact = side <= EXACT_SIDE
    assert row[0] == pytest.approx(1.2, rel=1e-5 if is_exact else 1e-2)
    assert row[0] <= 1.2 + 1e-5
    assert row[1] == pytest.approx(float((sigma**2 - 1).square().mean().sqrt()), rel=1e-5)
    assert row[2:] == pytest.approx([0.1 * float(U.square().mean().sqrt()), 0.5], rel=1e-5)


@pytest.mark.parametrize("side", [8, EXACT_SIDE + 8])
def test_what_is_not_finite_is_told_as_nan_and_spoils_no_neighbour(side: int) -> None:
    U = torch.eye(side).repeat(3, 1, 1)
    U[0, 1, 1], U[1, 0, 0] = math.nan, math.inf
    rows = measure(torch.ones_like(U), U, rate=1.0)
    assert rows[:2, 0].isnan().all()
    assert rows[2].tolist() == pytest.approx([1, 0, side**-0.5, 1], abs=1e-6)


@pytest.mark.parametrize(
    "coefficients", [dmuon.POLAR_EXPRESS_COEFFICIENTS, dmuon.CLASSIC_COEFFICIENTS]
)
@pytest.mark.parametrize("steps", [3, 5])
def test_newton_schulz_keeps_to_the_band(coefficients, steps: int) -> None:
    sigma = torch.cat([torch.full((1,), 1e-2), torch.linspace(0.02, 0.4, 15)]).double()
    X = matrix_with(sigma / sigma.norm(), 16, 20)
    assert (sigma / sigma.norm()).min() > 5e-3
    low, high = dmuon.singular_value_band(coefficients, steps, smallest=5e-3)
    settings = {"steps": steps, "coefficients": coefficients, "dtype": torch.float64}
    values = torch.linalg.svdvals(dmuon.newton_schulz(X, **settings))
    assert low - 1e-9 <= values.min() <= values.max() <= high + 1e-9
    assert high - low < 1.8  # a band, and not everything


def test_the_default_band_is_what_the_documents_say() -> None:
    assert dmuon.singular_value_band() == pytest.approx((0.846, 1.124), abs=1e-3)
    classic = dmuon.singular_value_band(dmuon.CLASSIC_COEFFICIENTS)
    assert classic == pytest.approx((0.471, 1.202), abs=1e-3)
