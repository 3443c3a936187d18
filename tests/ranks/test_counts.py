"""What a step costs, counted by ourselves and, beside us, at torch's own dispatcher."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from ranks_runner import run_ranks
from tiny import loss_of, share, tokens
from torch import nn
from wrapped import make_mesh, prepare

import dmuon
from dmuon import dedication

FLOAT, FLAG = 4, 4  # bytes of a weight or gradient, and of what says that there is a gradient
CALL = 80  # in which a rank tells the others what it does
NUM_MICRO_BATCHES = 3


def micro_batches(model: nn.Module, no_sync: bool) -> Iterator[None]:
    """Forward and backward of each part of a step's batch."""
    rows = share(tokens(0), dist.get_rank(), dist.get_world_size())
    for index, part in enumerate(rows.tensor_split(NUM_MICRO_BATCHES)):
        is_last = index == NUM_MICRO_BATCHES - 1
        with dmuon.no_sync(model) if no_sync and not is_last else nullcontext():
            (loss_of(model, part) / NUM_MICRO_BATCHES).backward()
        yield


@contextmanager
def counted(model: nn.Module) -> Iterator[Counter[str]]:
    """Our own count of bytes by kind, of what happens within."""
    counters = dmuon.get_counters(model)
    before, grown = Counter(counters.bytes), Counter[str]()
    yield grown
    grown.update(counters.bytes - before)


@pytest.mark.parametrize("no_sync", [True, False], ids=["no_sync", "every micro-batch"])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["2", "2x2"])
def test_newton_schulz_runs_once_a_matrix_and_step(shape: tuple[int, ...], no_sync: bool) -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(*shape))
        optimizer = dmuon.Muon(model)
        counters = dmuon.get_counters(model)
        for steps in range(1, 4):
            for _ in micro_batches(model, no_sync):
                pass
            optimizer.step()
            optimizer.zero_grad()
            assert counters.newton_schulz == steps * len(dmuon.get_owned_params(model))
        total = torch.tensor(counters.newton_schulz)
        dist.all_reduce(total)
        assert int(total) == 3 * len(dmuon.get_dedicated_params(model)) == 3 * 18

    run_ranks(math.prod(shape), body)


@pytest.mark.parametrize(
    "shape", [(2,), (3,), (1, 2), (2, 1), (2, 2)], ids=lambda shape: "x".join(map(str, shape))
)
def test_bytes_of_a_step_are_those_of_the_formula(shape: tuple[int, ...]) -> None:
    """Unshard along the row, reduce along row and column, publish along the column.

    ``step()`` itself publishes on a grid, and on a single row communicates nothing at all.
    """
    num_rows, num_columns = shape if len(shape) == 2 else (1, *shape)

    def check(rank: int, reshard: bool) -> None:
        model = prepare(make_mesh(*shape), reshard)
        optimizer = dmuon.Muon(model)
        everything = sizes_of(model, lambda owner: True)
        column = sizes_of(model, lambda owner: owner % num_columns == rank % num_columns)
        last_block = bytes_of(model, "layers.2.")
        reduced = sum(everything) if num_columns > 1 else 0
        reduced += sum(column) if num_rows > 1 else 0
        published = column[0] if num_rows > 1 else 0
        for no_sync in (True, False):
            with counted(model) as ours, Collectives() as seen:
                for _ in micro_batches(model, no_sync):
                    pass
                dmuon.clip_grad_norm_(model, math.inf)
            with counted(model) as ours_of_step, Collectives() as seen_of_step:
                optimizer.step()
                optimizer.zero_grad()
                dmuon.wait_all_replicate_broadcasts(model)
            # forward, and backward but for the last block, which stays whole between them
            unsharded = 2 * everything[0] - last_block if reshard else everything[0]
            reductions = 1 if no_sync else NUM_MICRO_BATCHES
            expected = Counter(
                broadcast=NUM_MICRO_BATCHES * unsharded * (num_columns > 1),
                all_to_all=reductions * reduced,
                all_reduce=FLOAT,  # of the norm
                agreement=(2 * NUM_MICRO_BATCHES + 1) * CALL,  # forwards, backwards, the norm
            )
            assert ours == +expected
            assert seen.bytes["broadcast"] == expected["broadcast"]
            assert seen.bytes["alltoall_base"] == expected["all_to_all"]
            assert ours_of_step == +Counter(publish=published)
            assert seen_of_step.bytes == +Counter(broadcast=published)

    def body(rank: int) -> None:
        check(rank, reshard=True)
        check(rank, reshard=False)

    run_ranks(math.prod(shape), body)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["2", "2x2"])
def test_step_alone_brings_in_no_gradients_on_one_row(shape: tuple[int, ...]) -> None:
    """Without clipping before it: on a grid the second leg of the last reductions is left to it."""

    def body(rank: int) -> None:
        model = prepare(make_mesh(*shape))
        optimizer = dmuon.Muon(model)
        for _ in micro_batches(model, no_sync=True):
            pass
        with Collectives() as seen:
            optimizer.step()
        assert set(seen.bytes) == ({"broadcast", "alltoall_base"} if len(shape) == 2 else set())

    run_ranks(math.prod(shape), body)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["2", "2x2"])
def test_the_last_block_alone_stays_whole_and_only_until_its_backward(
    shape: tuple[int, ...],
) -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(*shape))
        blocks = dedication.of(model).engine.blocks

        def whole() -> list[str]:
            return [block.name for block in blocks if not block.is_resharded]

        with torch.no_grad():
            loss_of(model, tokens(0))
        assert whole() == []
        loss = loss_of(model, tokens(0))
        assert whole() == ["layers.2"]
        with counted(model) as ours:
            loss.backward()
        assert whole() == []
        everything, _ = sizes_of(model, lambda owner: True)
        assert ours["broadcast"] == everything - bytes_of(model, "layers.2.")
        loss = loss_of(model, tokens(1))
        with torch.no_grad():
            loss_of(model, tokens(0))
        assert whole() == []
        loss.backward()  # it is brought back

    run_ranks(math.prod(shape), body)


def sizes_of(model: nn.Module, is_included: Callable[[int], bool]) -> tuple[int, int]:
    """Bytes of the matrices of some owners, and of the flags that travel with gradients."""
    params = [
        param
        for owner in range(dist.get_world_size())
        if is_included(owner)
        for param in dmuon.get_owned_params(model, owner).values()
    ]
    return sum(param.numel() for param in params) * FLOAT, len(params) * FLAG


def bytes_of(model: nn.Module, prefix: str) -> int:
    """Bytes of the matrices whose names begin so."""
    params = dmuon.get_dedicated_params(model).items()
    return FLOAT * sum(param.numel() for name, param in params if name.startswith(prefix))
