"""Newton-Schulz on a GPU: both forms against float64, batches to the last bit, no host sync."""

import pytest
import torch
from stacks import orthogonalized

from dmuon.batching import batch_size
from dmuon.cuda_graphs import GraphWorkspace
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

# batches of 16, 8 and 1
SHAPES = [(9, 13), (48, 200), (200, 48), (256, 1024), (768, 768), (2048, 768), (2048, 2048)]


@pytest.fixture(scope="module")
def workspace() -> GraphWorkspace:
    """One for all tests, as an optimizer has one for all steps."""
    return GraphWorkspace(torch.device(DEVICE, torch.cuda.current_device()))


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
def test_a_matrix_is_the_same_to_the_last_bit_alone_and_in_any_company(
    dtype: torch.dtype, workspace: GraphWorkspace
) -> None:
    """As captured graphs, and alone also without one."""
    assert {batch_size(*shape, "cuda") for shape in SHAPES} == {1, 8, 16}
    torch.manual_seed(0)
    stacks = [torch.randn(1, *shape, device=DEVICE) for shape in SHAPES for _ in range(3)]
    alone = [orthogonalized([stack], dtype)[0] for stack in stacks]
    for seed in range(3):
        order = torch.randperm(len(stacks), generator=torch.Generator().manual_seed(seed)).tolist()
        together = orthogonalized([stacks[i] for i in order], dtype, workspace)
        for i, result in zip(order, together, strict=True):
            assert torch.equal(result, alone[i]), stacks[i].shape


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_place_in_full_and_padded_batches_gives_the_same_bits(
    shape: tuple[int, int], workspace: GraphWorkspace
) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(1, *shape, device=DEVICE)
    (alone,) = orthogonalized([matrix])
    for count in (2, 15, 16, 17):
        (stack,) = orthogonalized([matrix.expand(count, *shape)], workspace=workspace)
        assert torch.equal(stack, alone.expand(count, *shape)), count


@pytest.mark.parametrize("shape", [(64, 74), (2048, 2304)], ids=str)
def test_views_give_the_bits_of_their_copies_and_transposes_the_transpose(
    shape: tuple[int, int], workspace: GraphWorkspace
) -> None:
    torch.manual_seed(0)
    view = torch.randn(2, shape[0] + 3, 2 * shape[1] + 2, device=DEVICE)[:, 1:-2, 1:-1:2]
    (result,) = orthogonalized([view], torch.float32, workspace)
    (copied,) = orthogonalized([view.contiguous()], torch.float32, workspace)
    assert torch.equal(result, copied)
    for _ in range(3):  # as it is, captured, and replayed
        (transposed,) = orthogonalized([view.mT], torch.float32, workspace)
        torch.testing.assert_close(result.mT, transposed, rtol=0, atol=1e-4)


def test_a_graph_is_replayed_from_the_third_time_on_and_captured_anew_for_a_larger_room() -> None:
    workspace = GraphWorkspace(torch.device(DEVICE, torch.cuda.current_device()))
    torch.manual_seed(0)
    small, large = (torch.randn(1, side, side, device=DEVICE) for side in (64, 2048))
    (expected,) = orthogonalized([small])
    for _ in range(3):
        assert torch.equal(orthogonalized([small], workspace=workspace)[0], expected)
    with torch.profiler.profile() as trace:
        orthogonalized([small], workspace=workspace)
    names = {event.name for event in trace.events()}
    assert "cudaGraphLaunch" in names
    assert "aten::bmm" not in names
    orthogonalized([large], workspace=workspace)
    for _ in range(3):
        assert torch.equal(orthogonalized([small], workspace=workspace)[0], expected)


def test_the_host_does_not_wait_for_the_device(workspace: GraphWorkspace) -> None:
    stacks = [torch.randn(3, *shape, device=DEVICE) for shape in SHAPES]
    for _ in range(2):  # libraries set themselves up, graphs are captured
        orthogonalized(stacks, workspace=workspace)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        orthogonalized(stacks, workspace=workspace)
        orthogonalized(stacks)
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
