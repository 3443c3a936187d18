"""Newton-Schulz, both forms, against the singular value decomposition in float64."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dmuon.newton_schulz import (
    CLASSIC_COEFFICIENTS,
    POLAR_EXPRESS_COEFFICIENTS,
    Coefficients,
    Form,
    choose_form,
    coefficient_schedule,
    newton_schulz,
    newton_schulz_,
    newton_schulz_flops,
    restart_blocks,
)

CLASSIC = CLASSIC_COEFFICIENTS
CUSTOM = [(3.0, -3.2, 1.2), (0.5, 0.0, 0.0), (2.0, -1.5, 0.5)]
FORMS: list[Form] = ["direct", "gram"]
SHAPES = [(32, 32), (20, 64), (64, 20), (10, 160), (1, 9), (9, 1), (1, 1)]

both_forms = pytest.mark.parametrize("form", FORMS)


def polar(matrix: torch.Tensor) -> torch.Tensor:
    U, _, Vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return U @ Vh


def polynomials(
    matrix: torch.Tensor, coefficients: Coefficients, all_steps: Sequence[int]
) -> list[torch.Tensor]:
    """The same steps on the singular values, in float64, for each number of steps."""
    U, start, Vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    results = []
    for steps in all_steps:
        sigma = start / start.norm()
        for a, b, c in coefficient_schedule(coefficients, steps):
            sigma = a * sigma + b * sigma**3 + c * sigma**5
        results.append(U @ torch.diag(sigma) @ Vh)
    return results


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).norm() / expected.norm())


def difficult_matrices(m: int, n: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    gaussian = torch.randn(m, n, dtype=torch.float64)
    U, _, Vh = torch.linalg.svd(gaussian, full_matrices=False)

    def with_values(sigma: torch.Tensor) -> torch.Tensor:
        return U @ torch.diag(sigma.double()) @ Vh

    one_huge = torch.full((m,), 0.03)
    one_huge[0] = 1.0
    low_rank = torch.randn(m, 4, dtype=torch.float64) @ torch.randn(4, n, dtype=torch.float64)
    return {
        "gaussian": gaussian,
        "orthogonal": with_values(torch.ones(m)),
        "condition 1e3": with_values(torch.logspace(0, -3, m)),
        "condition 1e6": with_values(torch.logspace(0, -6, m)),
        "power law": with_values(1 / torch.arange(1, m + 1)),
        "one huge": with_values(one_huge),
        "one very huge": with_values(one_huge**2),
        "low rank": low_rank,
        "low rank and noise": low_rank + 1e-3 * gaussian,
    }


@both_forms
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_eight_steps_reach_the_nearest_orthogonal_matrix(
    shape: tuple[int, int], form: Form
) -> None:
    torch.manual_seed(0)
    rows, columns = shape
    k = min(shape)
    U = torch.linalg.qr(torch.randn(rows, k, dtype=torch.float64)).Q
    V = torch.linalg.qr(torch.randn(columns, k, dtype=torch.float64)).Q
    matrix = U @ torch.diag(torch.logspace(0, -2, k, dtype=torch.float64)) @ V.T
    result = newton_schulz(matrix, steps=8, dtype=torch.float64, form=form)
    torch.testing.assert_close(result, polar(matrix), rtol=0, atol=1e-5)


def test_singular_values_of_five_steps_lie_close_to_one() -> None:
    """Singular values above 1e-3 of the norm end in [0.84, 1.13]; a sixth step in [0.99, 1.01]."""
    torch.manual_seed(0)
    values = torch.linalg.svdvals(newton_schulz(torch.randn(64, 256), dtype=torch.float64))
    assert values.min() > 0.84
    assert values.max() < 1.13
    sixth = torch.linalg.svdvals(newton_schulz(torch.randn(64, 256), steps=6, dtype=torch.float64))
    assert (sixth - 1).abs().max() < 0.01


@both_forms
@pytest.mark.parametrize("coefficients", [POLAR_EXPRESS_COEFFICIENTS, CLASSIC, CUSTOM], ids=len)
@pytest.mark.parametrize("steps", range(1, 11))
def test_each_step_is_the_polynomial_of_its_coefficients(
    steps: int, coefficients: Coefficients, form: Form
) -> None:
    for shape in SHAPES:
        torch.manual_seed(0)
        matrix = torch.randn(shape)
        result = newton_schulz(
            matrix, steps=steps, coefficients=coefficients, dtype=torch.float64, form=form
        )
        (expected,) = polynomials(matrix, coefficients, [steps])
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(48, 72), (48, 150), (32, 512)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("coefficients", [POLAR_EXPRESS_COEFFICIENTS, CLASSIC], ids=len)
def test_the_gram_form_is_about_as_accurate_as_the_direct_one(
    coefficients: Coefficients, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    rounding = 4 * torch.finfo(dtype).eps  # below it one form is lucky
    settings = {"coefficients": coefficients, "dtype": dtype}
    all_steps = (3, 5, 8)
    for name, matrix in difficult_matrices(*shape).items():
        answers = polynomials(matrix, coefficients, all_steps)
        for steps, expected in zip(all_steps, answers, strict=True):
            of_direct, of_gram = (
                relative_error(newton_schulz(matrix, steps=steps, form=form, **settings), expected)
                for form in FORMS
            )
            assert of_gram < 3.5 * max(of_direct, rounding), (name, steps)


def test_a_block_of_gram_steps_ends_where_its_errors_have_grown_too_far() -> None:
    def lengths(coefficients: Coefficients, steps: int) -> list[int]:
        return [len(block) for block in restart_blocks(coefficient_schedule(coefficients, steps))]

    assert lengths(POLAR_EXPRESS_COEFFICIENTS, 5) == [2, 2, 1]
    assert lengths(CLASSIC, 5) == [2, 2, 1]
    assert lengths((1.5, -0.5, 0.0), 5) == [5]  # the slow cubic grows nothing
    assert lengths((20.0, -1.0, 0.0), 3) == [1, 1, 1]


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


@both_forms
def test_a_batch_equals_its_matrices(form: Form) -> None:
    torch.manual_seed(0)
    batch = torch.randn(3, 2, 8, 12)
    whole = newton_schulz(batch, dtype=torch.float64, form=form)
    for i, j in itertools.product(range(3), range(2)):
        single = newton_schulz(batch[i, j], dtype=torch.float64, form=form)
        torch.testing.assert_close(whole[i, j], single)


@both_forms
def test_views_equal_their_copies(form: Form) -> None:
    torch.manual_seed(0)
    wide = torch.randn(5, 30, 40)
    for view in (
        wide[0, ::2, 3:],
        wide[0].T,
        wide[:, :, 1],
        wide[::2].mT,
        wide[:1].expand(3, -1, -1),
    ):
        result = newton_schulz(view, dtype=torch.float64, form=form)
        expected = newton_schulz(view.contiguous(), dtype=torch.float64, form=form)
        torch.testing.assert_close(result, expected)


@both_forms
def test_zeros_stay_zero(form: Form) -> None:
    assert torch.equal(newton_schulz(torch.zeros(4, 6), form=form), torch.zeros(4, 6))


@both_forms
@pytest.mark.parametrize("scale", [1e-36, 1e-25, 1e20, 1e34])
def test_the_scale_of_the_input_does_not_matter(scale: float, form: Form) -> None:
    """Squares of these entries are beyond float32; the norm is not."""
    torch.manual_seed(0)
    matrix = torch.randn(8, 12)
    scaled = newton_schulz(matrix * scale, eps=1e-40, form=form)
    torch.testing.assert_close(scaled, newton_schulz(matrix, form=form), rtol=0, atol=1e-4)


@both_forms
def test_narrow_entries_beyond_the_squares_of_float32_give_nan_or_hardly_an_update(
    form: Form,
) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(8, 12).bfloat16()
    expected = newton_schulz(matrix, dtype=torch.bfloat16, form=form)
    for scale in (1e-15, 1e15):
        scaled = newton_schulz(matrix * scale, dtype=torch.bfloat16, eps=1e-40, form=form)
        torch.testing.assert_close(scaled, expected, rtol=0, atol=0.05)
    assert newton_schulz(matrix * 1e30, dtype=torch.bfloat16, form=form).isnan().all()
    tiny = newton_schulz(matrix * 1e-30, dtype=torch.bfloat16, eps=1e-40, form=form)
    assert 0 < tiny.norm() < 1e-6


@both_forms
def test_entries_beyond_the_dtype_of_the_arithmetic_do_no_harm(form: Form) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(8, 12) * 1e6  # float16 ends at 65504
    expected = newton_schulz(matrix, form=form)
    assert relative_error(newton_schulz(matrix, dtype=torch.float16, form=form), expected) < 0.02


@both_forms
def test_a_norm_below_eps_gives_less_than_a_full_update_in_proportion(form: Form) -> None:
    torch.manual_seed(0)
    noise = torch.randn(8, 12) * 1e-17
    result = newton_schulz(noise, eps=1e-7, form=form)
    growth = 1.0
    for a, _, _ in POLAR_EXPRESS_COEFFICIENTS[:5]:
        growth *= a
    torch.testing.assert_close(result, noise / 1e-7 * growth, rtol=1e-4, atol=0)


@both_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (1, 5), (5, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_entry_that_is_not_finite_gives_nan_everywhere(
    value: float, shape: tuple[int, int], dtype: torch.dtype, form: Form
) -> None:
    matrix = torch.randn(shape)
    matrix[-1, -1] = value
    result = newton_schulz(matrix, dtype=dtype, steps=1, form=form)
    assert result.isnan().all()


@both_forms
def test_a_norm_beyond_float32_gives_nan_instead_of_zeros(form: Form) -> None:
    assert newton_schulz(torch.full((4, 6), 3e38), form=form).isnan().all()


@both_forms
@pytest.mark.parametrize("shape", [(3, 4), (4, 3)], ids=str)
def test_gradients_flow_through(shape: tuple[int, int], form: Form) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: newton_schulz(x, steps=3, dtype=torch.float64, form=form), (matrix,)
    )


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
        (
            {"matrix": torch.zeros(3, 3), "coefficients": [CLASSIC, (1.0, float("nan"), 0.0)]},
            r"must be finite numbers, got the entry \(1.0, nan, 0.0\)",
        ),
        ({"matrix": torch.zeros(3, 3), "coefficients": (float("inf"), 0.0, 0.0)}, "must be finite"),
        ({"matrix": torch.zeros(3, 3), "form": "Gram"}, "or None to choose, got 'Gram'"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        newton_schulz(**arguments)


@both_forms
@pytest.mark.parametrize("steps", [1, 2, 5, 9])
@pytest.mark.parametrize("shape", [(8, 8), (8, 40), (40, 8), (1, 3)], ids=str)
def test_flops_are_those_that_run(shape: tuple[int, int], steps: int, form: Form) -> None:
    with FlopCounterMode(display=False) as counter:
        newton_schulz(torch.randn(shape), steps=steps, form=form)
    assert newton_schulz_flops(*shape, steps, form=form) == counter.get_total_flops()


def test_the_form_is_chosen_by_the_operations_it_saves() -> None:
    assert choose_form(256, 256) == choose_form(256, 512) == "direct"
    assert choose_form(256, 1024) == choose_form(1024, 256) == "gram"
    assert choose_form(256, 4096, steps=1) == "direct"
    assert choose_form(256, 4096, coefficients=[(20.0, -1.0, 0.0)]) == "direct"  # all restarts
    assert choose_form(24, 4096) == "direct"  # too small to matter
    for rows, columns in itertools.product((128, 200, 512), (128, 300, 600, 4096)):
        gram, direct = (newton_schulz_flops(rows, columns, form=form) for form in FORMS[::-1])
        assert newton_schulz_flops(rows, columns) <= direct
        assert (choose_form(rows, columns) == "gram") == (gram <= 0.9 * direct)


def test_by_itself_it_takes_the_form_that_is_chosen() -> None:
    for shape in ((128, 640), (640, 128), (128, 128)):
        with FlopCounterMode(display=False) as counter:
            newton_schulz(torch.randn(shape))
        assert counter.get_total_flops() == newton_schulz_flops(*shape)


@pytest.mark.parametrize("stands", [False, True])
def test_in_place_on_16_bit_numbers_it_is_the_same(stands: bool) -> None:
    matrix = torch.randn(1, 96, 256)
    batch = matrix.bfloat16().mT.clone().mT if stands else matrix.bfloat16()
    schedule = coefficient_schedule(POLAR_EXPRESS_COEFFICIENTS, 5)
    newton_schulz_(batch, schedule, 1e-7)
    exact = newton_schulz(matrix)
    assert (batch.float() - exact).norm() < 0.05 * exact.norm()
