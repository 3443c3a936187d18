"""Newton-Schulz on a GPU: both forms against float64, batches to the last bit, no host sync."""

import pytest
import torch

from dmuon.batching import batch_size, orthogonalize_all
from dmuon.newton_schulz import (
    CLASSIC_COEFFICIENTS,
    POLAR_EXPRESS_COEFFICIENTS,
    Coefficients,
    choose_form,
    newton_schulz,
)

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [(9, 13), (64, 64), (48, 200), (200, 48), (256, 1024), (512, 512), (768, 768), (2048, 512)]


def run(stacks: list[torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return orthogonalize_all(
        stacks, steps=5, coefficients=POLAR_EXPRESS_COEFFICIENTS, dtype=dtype, eps=1e-7
    )


def gradient_like(rows: int, columns: int) -> torch.Tensor:
    """Singular values that fall over three decades."""
    torch.manual_seed(0)
    k = min(rows, columns)
    left = torch.linalg.qr(torch.randn(rows, k, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, k, dtype=torch.float64)).Q
    sigma = torch.logspace(0, -3, k, dtype=torch.float64)
    return (left * sigma @ right.mT).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("coefficients", [POLAR_EXPRESS_COEFFICIENTS, CLASSIC_COEFFICIENTS])
@pytest.mark.parametrize("steps", [3, 5, 8])
def test_both_forms_are_about_as_close_to_float64(
    steps: int, coefficients: Coefficients, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for matrix in (torch.randn(256, 1024, device=DEVICE), gradient_like(1024, 256)):
        exact = newton_schulz(
            matrix,
            steps=steps,
            coefficients=coefficients,
            dtype=torch.float64,
            form="direct",
        )
        direct, gram = (
            newton_schulz(matrix, steps=steps, coefficients=coefficients, dtype=dtype, form=form)
            .sub(exact)
            .norm()
            for form in ("direct", "gram")
        )
        assert direct < (0.3 if dtype == torch.bfloat16 else 1e-4) * exact.norm()
        assert gram < 3.5 * direct


def test_singular_values_of_the_form_taken_on_gpus_lie_close_to_one() -> None:
    assert choose_form(256, 1024) == "gram"
    torch.manual_seed(0)
    result = newton_schulz(torch.randn(256, 1024, device=DEVICE))
    assert result.dtype == torch.bfloat16
    values = torch.linalg.svdvals(result.float())
    assert values.min() > 0.8
    assert values.max() < 1.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_matrix_is_the_same_to_the_last_bit_alone_and_in_any_company(dtype: torch.dtype) -> None:
    assert len({batch_size(*shape, "cuda") for shape in SHAPES}) >= 3
    torch.manual_seed(0)
    stacks = [torch.randn(1, *shape, device=DEVICE) for shape in SHAPES for _ in range(3)]
    alone = [run([stack], dtype)[0] for stack in stacks]
    for seed in range(3):
        order = torch.randperm(len(stacks), generator=torch.Generator().manual_seed(seed)).tolist()
        together = run([stacks[i] for i in order], dtype)
        for i, result in zip(order, together, strict=True):
            assert torch.equal(result, alone[i]), stacks[i].shape


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_place_in_full_and_padded_batches_gives_the_same_bits(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(1, *shape, device=DEVICE)
    (alone,) = run([matrix])
    for count in (2, 15, 16, 17):
        (stack,) = run([matrix.expand(count, *shape)])
        assert torch.equal(stack, alone.expand(count, *shape)), count


def test_views_give_the_bits_of_their_copies() -> None:
    torch.manual_seed(0)
    view = torch.randn(4, 67, 150, device=DEVICE)[:, 1:-2, 1::2]
    (result,) = run([view])
    assert torch.equal(result, run([view.contiguous()])[0])
    assert torch.equal(result.mT, run([view.mT])[0])


def test_the_host_does_not_wait_for_the_device() -> None:
    stacks = [torch.randn(3, *shape, device=DEVICE) for shape in SHAPES]
    run(stacks)  # libraries set themselves up
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(stacks)
        for form in ("direct", "gram"):
            newton_schulz(stacks[0], form=form)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_is_not_finite_or_out_of_range_is_seen_on_gpus_too() -> None:
    torch.manual_seed(0)
    good = torch.randn(8, 12, device=DEVICE)
    bad = good.clone()
    bad[0, 0] = float("inf")
    for form in ("direct", "gram"):
        expected = newton_schulz(good, dtype=torch.float32, form=form)
        for scale in (1e-30, 1e30):
            scaled = newton_schulz(good * scale, dtype=torch.float32, eps=1e-40, form=form)
            torch.testing.assert_close(scaled, expected, rtol=0, atol=1e-4)
        assert newton_schulz(bad, form=form).isnan().all()
        assert newton_schulz(torch.full_like(good, 3e38), form=form).isnan().all()
