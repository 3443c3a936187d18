import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from dmuon_platform.data import Dataset
from dmuon_platform.data.permutation import Permutation
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.data_builders import build


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    documents = [bytes([65 + i % 26]) * (i % 50 + 1) for i in range(60)]
    return build(Path(tempfile.mkdtemp()), documents, shard_tokens=101)


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
@settings(max_examples=60)
def test_a_permutation_takes_each_place_once(size, seed, epoch):
    order = Permutation(size, seed, epoch)(np.arange(size))
    assert sorted(order.tolist()) == list(range(size))


def test_orders_differ_by_seed_and_epoch_and_never_change():
    def order(seed: int, epoch: int) -> list[int]:
        return Permutation(1000, seed, epoch)(np.arange(1000)).tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    # Pinned: a run that goes on under a later version must see the samples it would have seen.
    assert order(7, 3)[:5] == PINNED


PINNED = [734, 3, 290, 288, 196]


def test_an_order_looks_random():
    order = Permutation(10_000, 1, 0)(np.arange(10_000))
    steps = np.abs(np.diff(order))
    assert abs(steps.mean() - 10_000 / 3) < 150  # of independent places
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05


@given(
    batch=st.integers(1, 40),
    world_size=st.sampled_from([1, 2, 3, 4]),
    micro=st.integers(1, 5),
    seed=st.integers(0, 5),
    step=st.integers(0, 100),
)
@settings(max_examples=60)
def test_a_batch_is_the_same_however_it_is_divided(dataset, batch, world_size, micro, seed, step):
    whole = dataset.batch(step, slice(0, batch), batch, seed)
    edges = [batch * rank // world_size for rank in range(world_size + 1)]
    parts = [
        dataset.batch(step, slice(start, min(start + micro, end)), batch, seed)
        for first, end in itertools.pairwise(edges)
        for start in range(first, end, micro)
    ]
    assert whole.dtype == torch.int64
    assert whole.shape == (batch, 9)
    assert torch.equal(whole, torch.cat(parts))


@given(batch=st.integers(1, 40), num_epochs=st.integers(1, 3), seed=st.integers(0, 5))
@settings(max_examples=40)
def test_each_sample_comes_once_an_epoch(dataset, batch, num_epochs, seed):
    size = dataset.info.num_train_sequences
    num_steps = -(-num_epochs * size // batch)
    places = np.arange(num_steps * batch)
    seen = np.concatenate(
        [
            dataset.sample_numbers(places[s * batch : (s + 1) * batch], seed)
            for s in range(num_steps)
        ]
    )
    for epoch in range(num_epochs):
        assert sorted(seen[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))


def test_samples_are_windows_of_the_text_over_the_edges_of_files(dataset):
    assert len(dataset.info.train_shards) > 2
    stream = np.concatenate(
        [
            np.fromfile(Path(dataset.info.folder) / shard.file, "<u2")
            for shard in dataset.info.train_shards
        ]
    )
    numbers = dataset.sample_numbers(np.arange(dataset.info.num_train_sequences), seed=0)
    rows = dataset.batch(0, slice(None), len(numbers), seed=0)
    for number, row in zip(numbers, rows, strict=True):
        assert row.tolist() == stream[number * 8 : number * 8 + 9].tolist()


def test_held_out_samples_are_fixed_and_each_comes_once(dataset):
    count = dataset.num_validation_sequences
    rows = dataset.validation_batch(0, count)
    assert torch.equal(rows, torch.cat([dataset.validation_batch(i, 1) for i in range(count)]))
    stream = np.fromfile(Path(dataset.info.folder) / dataset.info.validation_shards[0].file, "<u2")
    starts = {row.tobytes() for row in rows.numpy().astype("<u2")}
    for index in range(min(count, (len(stream) - 1) // 8)):
        assert stream[index * 8 : index * 8 + 9].tobytes() in starts
    with pytest.raises(IndexError, match="held-out"):
        dataset.validation_batch(count, 1)
