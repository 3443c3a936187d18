"""What travels together: the arithmetic by hand, and what it says of known models."""

import pytest

import dmuon
from dmuon.packing import LINKS, Link, Slots, block_seconds, goes_by_block, owner_seconds
from dmuon.partition import Matrix, make_plan

BF16_AND_FP32 = (2, 4)


def test_slots_are_as_long_as_the_longest_and_begin_at_sixteen_bytes() -> None:
    slots = Slots([(2, 10), (0, 5), (2, 7)], 3)
    assert (slots.length, slots.numel) == (24, 72)
    assert slots.spans == [(48, 58), (0, 5), (58, 65)]
    assert slots.padding == [(5, 24), (24, 48), (65, 72)]
    assert slots.fills_its_slot(17)
    assert not slots.fills_its_slot(16)
    assert not Slots([(0, 16), (1, 16)], 2).padding


def test_seconds_are_those_of_the_formulas() -> None:
    link = Link(latency=1e-3, rate=1000.0)
    assert owner_seconds(3, 5000, 4, link) == pytest.approx(3 * 2 * 1e-3 + 5)
    assert block_seconds(2000, 4, link) == pytest.approx(3 * (1e-3 + 2))


@pytest.mark.parametrize(
    ("asked", "backend", "parcels", "num_ranks", "by_block"),
    [
        ("auto", "nccl", [(0, 10**6), (1, 10**6)], 2, True),  # both links at once
        ("auto", "nccl", [(0, 10**6), (1, 10**6)], 1, False),
        ("auto", "nccl", [], 4, False),
        ("auto", "nccl", [(rank, 10**8) for rank in range(8)], 8, False),  # 7/8: not clearly
        ("auto", "nccl", [(rank, 10**4) for rank in range(8)], 8, True),  # messages count
        ("auto", "nccl", [(0, 10**4), (1, 10**4), (2, 10**4)], 4, False),  # a third is padding
        ("auto", "gloo", [(0, 100), (1, 100)], 2, False),
        ("auto", "ucc", [(0, 100), (1, 100)], 2, False),
        ("owner", "nccl", [(0, 10**6), (1, 10**6)], 2, False),
        ("block", "gloo", [(0, 100)], 4, True),
        ("block", "gloo", [(0, 100)], 1, False),
    ],
)
def test_the_choice(
    asked: dmuon.packing.Packing,
    backend: str,
    parcels: list[tuple[int, int]],
    num_ranks: int,
    by_block: bool,
) -> None:
    assert goes_by_block(asked, backend, parcels, num_ranks, BF16_AND_FP32) == by_block


def layers(width: int, keys: int, hidden: int, num_experts: int) -> list[Matrix]:
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    mlp = [(hidden, width), (hidden, width), (width, hidden)]
    return [
        Matrix(f"{layer}.{index}", shape, str(layer))
        for layer in range(16)
        for index, shape in enumerate(attention + mlp * num_experts)
    ]


LLAMA_8B, OLMOE = (4096, 1024, 14336, 1), (2048, 2048, 1024, 64)


@pytest.mark.parametrize(
    ("sizes", "mesh", "num_whole"),
    [
        (LLAMA_8B, (1, 2), 16),
        (LLAMA_8B, (1, 8), 0),
        (LLAMA_8B, (64, 8), 0),
        (OLMOE, (1, 4), 16),
        (OLMOE, (1, 8), 0),
        (OLMOE, (64, 8), 16),
        (OLMOE, (1, 512), 0),
    ],
    ids=str,
)
def test_whole_blocks_of_known_models_with_nccl(
    sizes: tuple[int, int, int, int], mesh: tuple[int, int], num_whole: int
) -> None:
    """Dense layers do not divide evenly by more than two; experts do, and have many owners."""
    num_replicas, num_shards = mesh
    plan = make_plan(layers(*sizes), num_replicas * num_shards)
    blocks: dict[str, dict[int, int]] = {}
    for matrix, owner in zip(plan.matrices, plan.owners, strict=True):
        held = blocks.setdefault(matrix.block, {})
        held[owner] = held.get(owner, 0) + matrix.numel
    whole = [
        goes_by_block(
            "auto", "nccl", [(o % num_shards, n) for o, n in held.items()], num_shards, (2, 4)
        )
        for held in blocks.values()
    ]
    assert sum(whole) == num_whole


def test_the_planner_and_the_choice_take_a_message_for_equally_long() -> None:
    assert dmuon.Cluster("h100").latency == LINKS["nccl"].latency
