"""The plan: balanced, spread over a block, and a pure function."""

import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.plain_partition import plain_owners

import dmuon
from dmuon import Matrix, Plan, make_plan
from dmuon.layout import make_layout

Shape = tuple[int, ...]


def model(num_layers: int, shapes: list[Shape]) -> list[Matrix]:
    return [
        Matrix(f"layers.{layer}.{place}", shape, f"layers.{layer}")
        for layer in range(num_layers)
        for place, shape in enumerate(shapes)
    ]


def llama(width: int, keys: int, hidden: int) -> list[Shape]:
    up = (hidden, width)
    return [*[(width, width)] * 2, *[(keys, width)] * 2, up, up, (width, hidden)]


def decoder(num_layers: int, width: int = 64) -> list[Matrix]:
    return model(num_layers, llama(width, width // 4, 3 * width))


GPT_2 = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
MIXTRAL = [*llama(4096, 1024, 1)[:4], (8, 4096), (8, 28672, 4096), (8, 4096, 14336)]
REAL = {
    "Llama 125M": model(12, llama(768, 768, 2048)),
    "Llama 1B": model(16, llama(2048, 512, 8192)),
    "Llama 8B": model(32, llama(4096, 1024, 14336)),
    "GPT-2": model(12, GPT_2),
    "Mixtral": model(32, MIXTRAL),
}


def least_possible(costs: list[int], num_owners: int) -> float:
    """No plan's busiest owner has less: the mean, or what the pigeonhole principle says.

    Among the ``k * num_owners + 1`` costliest, some owner has ``k + 1``, at least the cheapest.
    """
    costs = sorted(costs, reverse=True)
    bound = sum(costs) / num_owners
    for k in range(-(-len(costs) // num_owners)):
        bound = max(bound, sum(costs[k * num_owners - k : k * num_owners + 1]))
    return bound


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("num_owners", [2, 4, 8, 16, 32, 64])
def test_on_powers_of_two_the_busiest_owner_has_what_it_must_have(
    name: str, num_owners: int
) -> None:
    """A tenth above the least that any plan could give it."""
    plan = make_plan(REAL[name], num_owners)
    least = least_possible([matrix.cost for matrix in plan.matrices], num_owners)
    assert max(plan.cost_per_owner) <= 1.1 * least


@pytest.mark.parametrize("name", REAL)
def test_work_is_balanced_wherever_three_of_the_costliest_make_a_fair_share(name: str) -> None:
    """With fewer, some numbers of owners cannot be balanced at all (checked by integer programs).

    Bytes follow: matrices of equal bytes cost up to five times more or less, by their shorter side.
    """
    matrices = REAL[name]
    costs = [matrix.cost for matrix in matrices]
    fitting = [n for n in range(1, 65) if 3 * max(costs) * n <= sum(costs)]
    assert max(fitting) >= 11
    for num_owners in fitting:
        plan = make_plan(matrices, num_owners)
        assert plan.imbalance <= 1.1, num_owners
        assert max(plan.bytes_per_owner) * num_owners <= 1.3 * sum(plan.bytes_per_owner)


def test_a_plan_of_many_matrices_over_many_owners_is_balanced() -> None:
    plan = make_plan(model(250, llama(4096, 1024, 14336)), 256)
    assert plan.imbalance <= 1.1
    assert max(plan.bytes_per_owner) * 256 <= 1.15 * sum(plan.bytes_per_owner)


def test_so_is_one_of_a_hundred_thousand_over_sixteen_thousand() -> None:
    """Looking at every owner for every matrix would take minutes."""
    plan = make_plan(model(14_286, llama(4096, 1024, 14336)), 16_384)
    assert len(plan.matrices) > 100_000
    assert plan.imbalance <= 1.01
    assert max(plan.bytes_per_owner) * 16_384 <= 1.3 * sum(plan.bytes_per_owner)


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


def test_a_plan_counts_costs_and_shows_every_matrix_of_a_parameter() -> None:
    experts = Matrix("experts", (8, 32, 16), "")
    one_expert = Matrix("expert", (32, 16), "")
    assert (experts.cost, experts.num_matrices) == (8 * one_expert.cost, 8)
    whole = Matrix("qkv", (48, 16), "")
    fused = Matrix("qkv", (48, 16), "", make_layout("qkv", (48, 16), split=dmuon.Split(16)))
    assert (fused.cost, fused.num_matrices) == (3 * Matrix("q", (16, 16), "").cost, 3)
    assert (fused.numel, whole.num_matrices) == (whole.numel, 1)

    plan = make_plan([experts, fused], 2)
    assert sum(plan.num_matrices_per_owner) == 11
    assert sorted(plan.num_matrices_per_owner) == [3, 8]
    entries = plan.to_dict()["matrices"]
    assert [(e["parts"], e["split_dim"], e["kind"]) for e in entries] == [  # type: ignore[attr-defined]
        ([[8, 32, 16]], None, "stack"),
        ([[1, 16, 16]] * 3, 0, "matrix"),
    ]
    header, first, second, *totals = str(plan).splitlines()
    assert header.split() == ["parameter", "shape", "owner", "GFLOP", "MiB", "held", "as"]
    assert first.split()[:2] == ["experts", "8x32x16"]
    assert first.endswith("  stack of 8")
    assert second.endswith("  matrix, rows split in 3 x 16")
    assert totals[plan.owner_of("experts")].startswith(
        f"owner {plan.owner_of('experts')}: 1 parameters with 8 matrices"
    )
    assert totals[-1] == f"busiest owner over the mean: {plan.imbalance:.3f}"


def test_plans_differ_when_splits_do() -> None:
    def digest(split: dmuon.Split | None) -> str:
        layout = make_layout("w", (32, 32), split=split)
        return make_plan([Matrix("w", (32, 32), "", layout)], 2).digest()

    splits = [None, dmuon.Split(16), dmuon.Split(16, dim=1), dmuon.Split((16, 8, 8))]
    assert len({digest(split) for split in splits}) == 4


def test_an_empty_plan_prints_and_an_impossible_one_is_refused() -> None:
    plan = make_plan([], 2)
    assert (plan.imbalance, plan.cost_per_owner, plan.bytes_per_owner) == (1.0, [0, 0], [0, 0])
    assert "owner 1: 0 parameters" in str(plan)
    assert plan.digest() != make_plan([], 3).digest()
    with pytest.raises(ValueError, match="num_owners must be at least 1, got 0"):
        make_plan([], 0)
    with pytest.raises(dmuon.SetupError, match=r"w has shape \(5,\)"):
        Matrix("w", (5,), "")


shapes = st.tuples(st.integers(1, 300), st.integers(1, 300))


@settings(max_examples=60)
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


few_shapes = st.lists(shapes, min_size=1, max_size=6)


@settings(max_examples=60)
@given(few_shapes, st.integers(1, 60), st.integers(1, 70), st.randoms(use_true_random=False))
def test_the_plan_is_that_of_asking_every_owner(
    kinds: list[Shape], length: int, num_owners: int, random: Random
) -> None:
    blocks = [f"b{i * 6 // length}" for i in range(length)]
    if random.random() < 0.3:
        random.shuffle(blocks)
    matrices = [Matrix(f"m{i}", random.choice(kinds), blocks[i]) for i in range(length)]
    assert list(make_plan(matrices, num_owners).owners) == plain_owners(matrices, num_owners)


def test_it_is_also_where_loads_have_to_be_exchanged() -> None:
    for matrices, num_owners in [(REAL["Llama 1B"], 37), (model(60, llama(64, 16, 200)), 61)]:
        assert list(make_plan(matrices, num_owners).owners) == plain_owners(matrices, num_owners)
