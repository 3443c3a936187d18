"""Many matrices at once: each the same to the last bit as in any other company."""

import pytest
import torch
from stacks import orthogonalized as run
from torch.utils._python_dispatch import TorchDispatchMode

from dmuon.batching import batch_size
from dmuon.newton_schulz import newton_schulz

SQUARES = [(24, 24), (1, 1)]
OTHERS = [(24, 50), (50, 24), (9, 13), (13, 9), (1, 7), (7, 1), (48, 65), (80, 96)]
SHAPES = SQUARES + OTHERS


def matrices(count: int, shapes: list[tuple[int, int]] = SHAPES) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, *shape) for shape in shapes for _ in range(count)]


def test_the_shapes_of_these_tests_take_batches_of_several_sizes() -> None:
    sizes = {batch_size(*shape, "cpu") for shape in SHAPES}
    assert {1, 2, 8} <= sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_matrix_is_the_same_to_the_last_bit_alone_and_in_any_company(dtype: torch.dtype) -> None:
    stacks = matrices(3)
    alone = [run([stack], dtype)[0] for stack in stacks]
    for generator in (torch.Generator().manual_seed(seed) for seed in range(3)):
        order = torch.randperm(len(stacks), generator=generator).tolist()
        together = run([stacks[i] for i in order], dtype)
        for i, result in zip(order, together, strict=True):
            assert torch.equal(result, alone[i]), stacks[i].shape


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_place_in_full_and_padded_batches_gives_the_same_bits(shape: tuple[int, int]) -> None:
    same = matrices(1, [shape])[0]
    (alone,) = run([same])
    for count in range(2, 12):
        (stack,) = run([same.expand(count, *shape)])
        assert all(torch.equal(result, alone[0]) for result in stack), count


class Products(TorchDispatchMode):
    """Shapes of all operands of batched matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[torch.Size, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "bmm" in str(func):
            self.shapes.add(tuple(a.shape for a in args if isinstance(a, torch.Tensor)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_see_the_same_shapes_whatever_the_company(shape: tuple[int, int]) -> None:
    """Other libraries than this CPU's choose their kernel, so their rounding, by the shape."""
    seen = []
    for count in (1, 2, 9):
        with Products() as products:
            run([torch.zeros(count, *shape)])
        seen.append(products.shapes)
    assert seen[0]
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_stack_of_experts_equals_its_matrices_apart(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    experts = torch.randn(5, *shape)
    (whole,) = run([experts])
    assert whole.shape == experts.shape
    assert torch.equal(whole, torch.cat(run(list(experts.split(1)))))


@pytest.mark.parametrize("shape", OTHERS, ids=str)
def test_views_give_the_bits_of_their_copies_and_transposes_the_transpose(
    shape: tuple[int, int],
) -> None:
    torch.manual_seed(0)
    wide = torch.randn(2, shape[0] + 3, shape[1] + 2)
    view = wide[:, 1:-2, 1:-1]
    before = wide.clone()
    (result,) = run([view])
    assert torch.equal(wide, before)
    assert torch.equal(result, run([view.contiguous()])[0])
    torch.testing.assert_close(result.mT, run([view.mT])[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_result_is_that_of_newton_schulz(shape: tuple[int, int]) -> None:
    (stack,) = matrices(1, [shape])
    (result,) = run([stack, torch.ones(1, *shape)], torch.float64)[:1]
    expected = newton_schulz(stack, dtype=torch.float64)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)


def test_a_matrix_that_is_not_finite_spoils_no_other() -> None:
    good, bad = torch.randn(1, 24, 24), torch.full((1, 24, 24), float("nan"))
    results = run([bad, good])
    assert results[0].isnan().all()
    assert torch.equal(results[1], run([good])[0])


def test_nothing_of_an_empty_list_is_orthogonalised() -> None:
    assert run([]) == []


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_batch_sizes_fall_with_the_size_of_the_matrix_and_ignore_its_orientation(
    device_type: str,
) -> None:
    sizes = [batch_size(2**power, 2**power, device_type) for power in range(14)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 1
    assert sizes[-1] == 1
    assert batch_size(24, 50, device_type) == batch_size(50, 24, device_type)


def test_accelerators_batch_up_to_about_a_thousand() -> None:
    assert batch_size(768, 768, "cuda") > 1
    assert batch_size(2048, 2048, "cuda") == 1
