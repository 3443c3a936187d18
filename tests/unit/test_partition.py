"""The plan: balanced, spread over a block, and a pure function."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon import Matrix, Plan, make_plan


def decoder(num_layers: int, width: int = 64) -> list[Matrix]:
    shapes = {"q": (width, width), "k": (width // 4, width), "v": (width // 4, width)}
    shapes |= {"o": (width, width), "gate": (3 * width, width), "up": (3 * width, width)}
    shapes |= {"down": (width, 3 * width)}
    return [
        Matrix(f"layers.{layer}.{name}", shape, f"layers.{layer}")
        for layer in range(num_layers)
        for name, shape in shapes.items()
    ]


@pytest.mark.parametrize("num_owners", [1, 2, 3, 4, 8])
def test_work_and_memory_are_balanced(num_owners: int) -> None:
    plan = make_plan(decoder(16), num_owners)
    assert plan.imbalance <= 1.1
    assert max(plan.bytes_per_owner) <= 1.1 * sum(plan.bytes_per_owner) / num_owners


def test_matrices_of_one_block_have_different_owners() -> None:
    plan = make_plan(decoder(8), 4)
    for layer in range(8):
        owners = {
            owner
            for matrix, owner in zip(plan.matrices, plan.owners, strict=True)
            if matrix.block == f"layers.{layer}"
        }
        assert len(owners) == 4


def test_the_plan_is_plain_data_and_prints_every_matrix() -> None:
    plan = make_plan(decoder(2), 2)
    data = json.loads(json.dumps(plan.to_dict()))
    assert [m["owner"] for m in data["matrices"]] == list(plan.owners)
    assert all(matrix.name in str(plan) for matrix in plan.matrices)
    assert plan.digest() == make_plan(decoder(2), 2).digest() != make_plan(decoder(2), 3).digest()


shapes = st.tuples(st.integers(1, 300), st.integers(1, 300))


@settings(deadline=None, max_examples=60)
@given(st.lists(shapes, min_size=1, max_size=40), st.integers(1, 9))
def test_every_matrix_has_one_owner_and_no_owner_is_overloaded(
    sizes: list[tuple[int, int]], num_owners: int
) -> None:
    matrices = [Matrix(f"m{i}", shape, f"b{i % 3}") for i, shape in enumerate(sizes)]
    plan: Plan = make_plan(matrices, num_owners)
    assert len(plan.owners) == len(matrices)
    assert set(plan.owners) <= set(range(num_owners))
    assert sum(plan.cost_per_owner) == sum(matrix.cost for matrix in matrices)
    # an owner's larger share exceeds the fair one by at most one matrix and the other quantity
    fair = 2 / num_owners
    total = sum(plan.cost_per_owner)
    largest = max(matrix.cost for matrix in matrices)
    assert max(plan.cost_per_owner) <= fair * total + largest
