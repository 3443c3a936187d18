"""Newton-Schulz against the singular value decomposition in float64."""

import pytest
import torch

from dmuon.newton_schulz import (
    POLAR_EXPRESS_COEFFICIENTS,
    coefficient_schedule,
    newton_schulz,
    newton_schulz_flops,
)

CLASSIC = (3.4445, -4.7750, 2.0315)


def polar(matrix: torch.Tensor) -> torch.Tensor:
    U, _, Vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return U @ Vh


@pytest.mark.parametrize("shape", [(32, 32), (20, 64), (64, 20), (1, 9), (9, 1), (1, 1)], ids=str)
def test_eight_steps_reach_the_nearest_orthogonal_matrix(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    rows, columns = shape
    k = min(shape)
    U = torch.linalg.qr(torch.randn(rows, k, dtype=torch.float64)).Q
    V = torch.linalg.qr(torch.randn(columns, k, dtype=torch.float64)).Q
    matrix = U @ torch.diag(torch.logspace(0, -2, k, dtype=torch.float64)) @ V.T
    result = newton_schulz(matrix, steps=8, dtype=torch.float64)
    torch.testing.assert_close(result, polar(matrix), rtol=0, atol=1e-5)


def test_singular_values_of_five_steps_lie_close_to_one() -> None:
    """Singular values above 1e-3 of the norm end in [0.84, 1.13]; a sixth step in [0.99, 1.01]."""
    torch.manual_seed(0)
    values = torch.linalg.svdvals(newton_schulz(torch.randn(64, 256), dtype=torch.float64))
    assert values.min() > 0.84
    assert values.max() < 1.13
    sixth = torch.linalg.svdvals(newton_schulz(torch.randn(64, 256), steps=6, dtype=torch.float64))
    assert (sixth - 1).abs().max() < 0.01


def test_each_step_is_the_polynomial_of_its_coefficients() -> None:
    sigma = torch.tensor([0.9, 0.3, 0.01], dtype=torch.float64)
    expected = sigma / sigma.norm()
    for a, b, c in POLAR_EXPRESS_COEFFICIENTS[:5]:
        expected = a * expected + b * expected**3 + c * expected**5
    result = newton_schulz(torch.diag(sigma), dtype=torch.float64)
    torch.testing.assert_close(result, torch.diag(expected))


@pytest.mark.parametrize("shape", [(16, 40), (40, 16)], ids=str)
def test_classic_coefficients_equal_torch_optim_muon(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    grad = torch.randn(shape)
    param = torch.nn.Parameter(torch.zeros(shape))
    param.grad = grad.clone()
    muon = torch.optim.Muon([param], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False)
    muon.step()
    ours = newton_schulz(grad, coefficients=CLASSIC, dtype=torch.bfloat16).float()
    scale = max(1.0, shape[0] / shape[1]) ** 0.5
    theirs = -param.detach() / scale
    exact = newton_schulz(grad, coefficients=CLASSIC, dtype=torch.float64).float()
    explained = (theirs - exact).norm()  # by bfloat16
    assert explained < 0.05 * exact.norm()
    assert (ours - exact).norm() < 1.5 * explained
    alike = newton_schulz(grad, coefficients=CLASSIC, dtype=torch.float32)
    torch.testing.assert_close(alike, exact, rtol=0, atol=1e-5)


def test_a_batch_equals_its_matrices() -> None:
    torch.manual_seed(0)
    batch = torch.randn(3, 2, 8, 12)
    whole = newton_schulz(batch, dtype=torch.float64)
    for i in range(3):
        for j in range(2):
            single = newton_schulz(batch[i, j], dtype=torch.float64)
            torch.testing.assert_close(whole[i, j], single)


def test_zeros_stay_zero() -> None:
    assert torch.equal(newton_schulz(torch.zeros(4, 6)), torch.zeros(4, 6))


def test_the_last_coefficients_repeat_and_one_triple_serves_all_steps() -> None:
    assert coefficient_schedule(CLASSIC, 3) == [CLASSIC] * 3
    assert coefficient_schedule([CLASSIC, (1.0, 0.0, 0.0)], 3)[1:] == [(1.0, 0.0, 0.0)] * 2
    assert len(coefficient_schedule(POLAR_EXPRESS_COEFFICIENTS, 20)) == 20


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"matrix": torch.zeros(3)}, r"needs a matrix .* got \(3,\)"),
        ({"matrix": torch.zeros(3, 3), "steps": 0}, "at least 1, got 0"),
        ({"matrix": torch.zeros(3, 3), "coefficients": [(1.0, 2.0)]}, "one a step"),
        ({"matrix": torch.zeros(3, 3), "coefficients": []}, "is empty"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        newton_schulz(**arguments)


def test_flops_count_the_three_products() -> None:
    assert newton_schulz_flops(2, 3, steps=1) == 2 * 2 * 2 * 3 + 2 * 2 * 2 * 2 + 2 * 2 * 2 * 3
    assert newton_schulz_flops(3, 2, steps=4) == 4 * newton_schulz_flops(2, 3, steps=1)
