"""Storage that is slow: training goes on beside it, saves queue up, and nothing older is lost."""

import os
import signal
import threading
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import assert_same, states
from ranks_runner import run_ranks
from slow_storage import slow_storage
from torch import nn
from wrapped import make_mesh, prepare, train

import dmuon
from dmuon.checkpoint.manifest import MANIFEST_FILE

DELAY_S = 0.02
WAIT_S = 0.5  # of the next save for one that is not done
NUM_STEPS = 3


def prepared(seed: int = 0) -> tuple[nn.Module, dmuon.Muon]:
    model = prepare(make_mesh(2), seed=seed)
    return model, dmuon.Muon(model, ns_dtype=torch.float32)


@pytest.mark.parametrize("slow_ranks", [(0, 1), (1,)], ids=["all", "one"])
def test_training_goes_on_while_a_save_is_slow_and_the_next_save_waits(
    slow_ranks: tuple[int, ...], tmp_path: Path
) -> None:
    def body(rank: int) -> None:
        model, optimizer = prepared()
        undisturbed = train(model, optimizer, range(1 + 2 * NUM_STEPS))
        model, optimizer = prepared()
        losses = train(model, optimizer, range(1))
        dmuon.save_checkpoint(tmp_path / "older", model, optimizer)
        with slow_storage(0) as disk:
            if rank in slow_ranks:
                disk.hold()
            first = dmuon.save_checkpoint(tmp_path / "first", model, optimizer, async_save=True)
            expected = states(model, optimizer)
            losses += train(model, optimizer, range(1, 1 + NUM_STEPS))
            assert not first.done
            threading.Timer(WAIT_S, disk.release).start()
            second = dmuon.save_checkpoint(tmp_path / "second", model, optimizer, async_save=True)
            assert first.done
            losses += train(model, optimizer, range(1 + NUM_STEPS, 1 + 2 * NUM_STEPS))
            assert second.wait().step == 1 + NUM_STEPS
        assert disk.num_writes > 50
        assert losses == undisturbed
        for name in ("older", "first"):
            dmuon.load_checkpoint(tmp_path / name, model, optimizer)
            assert_same(states(model, optimizer), expected)

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:no checkpoint was made")
@pytest.mark.parametrize("beside", [True, False], ids=["async", "sync"])
def test_a_rank_slower_than_the_timeout_fails_the_save_and_not_the_next(
    beside: bool, tmp_path: Path
) -> None:
    options = {"timeout": timedelta(seconds=2)}

    def body(rank: int) -> None:
        model, optimizer = prepared()
        losses = train(model, optimizer, range(1))
        dmuon.save_checkpoint(tmp_path / "older", model, optimizer, **options)
        with slow_storage(3 * DELAY_S if rank == 1 else 0):
            with pytest.raises(dmuon.CheckpointError, match="took longer than the timeout"):
                dmuon.save_checkpoint(
                    tmp_path / "new", model, optimizer, async_save=beside, **options
                ).wait()
            losses += train(model, optimizer, range(1, 3))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "new held a save that was never finished")
            dmuon.save_checkpoint(tmp_path / "new", model, optimizer, **options)
        dmuon.load_checkpoint(tmp_path / "older", model, optimizer)
        assert train(model, optimizer, range(1, 3)) == losses[1:]
        assert dmuon.load_checkpoint(tmp_path / "new", model, optimizer).step == 3

    run_ranks(2, body)
    assert not (tmp_path / "new.unfinished-1" / MANIFEST_FILE).exists()


def on_all_ranks(condition: bool) -> bool:
    """So that all train equally often. Collective."""
    least = torch.tensor(int(condition))
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return bool(least)


def test_a_kill_in_the_middle_of_a_slow_save_leaves_what_is_older(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = prepared()
        train(model, optimizer, range(1))
        dmuon.save_checkpoint(tmp_path / "older", model, optimizer)
        dist.barrier()
        with slow_storage(DELAY_S) as disk:
            handle = dmuon.save_checkpoint(tmp_path / "new", model, optimizer, async_save=True)
            while not on_all_ranks(disk.num_writes >= 20):
                train(model, optimizer, range(1))
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            handle.wait()

    with pytest.raises(AssertionError, match="rank 1 failed:\ndied without a traceback"):
        run_ranks(2, body)
    assert dmuon.verify_checkpoint(tmp_path / "older").step == 1
    passed_over = dmuon.list_checkpoints(tmp_path).passed_over
    assert [each.path.name for each in passed_over] == ["new"]
