"""Saves that go on beside training: the values of the call, one after another, errors on all."""

import errno
import multiprocessing as mp
import resource
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from checkpoints import assert_same, copying_held, states, writing_held
from ranks_runner import run_ranks
from torch import nn
from wrapped import backward, make_mesh, prepare, train

import dmuon
from dmuon.checkpoint import gathering
from dmuon.checkpoint.loading import load_checkpoint
from dmuon.checkpoint.manifest import MANIFEST_FILE, read_manifest
from dmuon.checkpoint.saving import save_checkpoint


@contextmanager
def no_large_files() -> Iterator[None]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def prepared(*mesh: int, seed: int = 0) -> tuple[nn.Module, dmuon.Muon]:
    model = prepare(make_mesh(*mesh), seed=seed)
    return model, dmuon.Muon(model, ns_dtype=torch.float32)


def test_the_values_are_those_of_the_call_whatever_changes_before_they_are_written(
    tmp_path: Path,
) -> None:
    def body(rank: int) -> None:
        model, optimizer = prepared(2, 2)
        train(model, optimizer, range(2))
        backward(model, 2)
        optimizer.step()  # what it publishes is under way
        extra = {"seen": [1, 2]}
        files = {"config.json": b"{}"}
        with writing_held() as may_write:
            handle = save_checkpoint(
                tmp_path / "new", model, optimizer, extra=extra, files=files, async_save=True
            )
            expected = states(model, optimizer)
            optimizer.zero_grad()
            extra["seen"].append(3)
            files["other.json"] = b"{}"
            train(model, optimizer, range(3, 5))
            optimizer.param_groups[0]["lr"] = 0.5
            assert not handle.done
            may_write.set()
            manifest = handle.wait()
        assert handle.done
        assert manifest.step == 3
        other, its_optimizer = prepared(2, 2, seed=1)
        loaded = load_checkpoint(tmp_path / "new", other, its_optimizer)
        assert loaded.extra == {"seen": [1, 2]}
        assert not (tmp_path / "new" / "other.json").exists()
        assert_same(states(other, its_optimizer), expected)

    run_ranks(4, body)


def load_backwards(model: nn.Module, optimizer: dmuon.Muon) -> None:
    """Other values everywhere, by the functions for users' own scripts."""
    weights = dmuon.get_model_state_dict(model)
    dmuon.set_model_state_dict(model, {name: -value for name, value in weights.items()})


CHANGES = {
    "step": lambda model, optimizer: optimizer.step(),
    "set_model_state_dict": load_backwards,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_weights_waits_until_they_are_copied(
    change: Callable[[nn.Module, dmuon.Muon], None], tmp_path: Path
) -> None:
    def body(rank: int) -> None:
        model, optimizer = prepared(2)
        train(model, optimizer, range(2))
        expected = states(model, optimizer)
        with copying_held() as may_copy:
            handle = save_checkpoint(tmp_path / "new", model, optimizer, async_save=True)
            backward(model, 2)  # goes on meanwhile
            threading.Timer(0.3, may_copy.set).start()
            change(model, optimizer)
            assert may_copy.is_set()
            handle.wait()
        with pytest.raises(AssertionError):
            assert_same(states(model, optimizer), expected)
        load_checkpoint(tmp_path / "new", model, optimizer)
        assert_same(states(model, optimizer), expected)

    run_ranks(2, body)


def owned(model: nn.Module, _: dmuon.Muon) -> torch.Tensor:
    return next(iter(dmuon.get_owned_params(model, rank=1).values()))


def momentum(model: nn.Module, optimizer: dmuon.Muon) -> torch.Tensor:
    return optimizer.state[owned(model, optimizer)]["momentum_buffer"]


BY_HAND = {
    "an owned weight": owned,
    "momentum": lambda model, optimizer: optimizer.state[owned(model, optimizer)][
        "momentum_buffer"
    ],
    "a sharded weight": lambda model, optimizer: model.embed.weight,
    "a shard of a weight": lambda model, optimizer: model.embed.weight.to_local(),
    "a sharded moment": lambda model, optimizer: optimizer.state[model.embed.weight]["exp_avg"],
}


@pytest.mark.filterwarnings("ignore:no checkpoint was made")
@pytest.mark.parametrize("waits", [True, False], ids=["after waiting", "without waiting"])
@pytest.mark.parametrize("of", BY_HAND.values(), ids=BY_HAND)
def test_what_is_changed_by_hand_while_it_is_copied_is_an_error_on_all_ranks(
    of: Callable[[nn.Module, dmuon.Muon], torch.Tensor], waits: bool, tmp_path: Path
) -> None:
    def body(rank: int) -> None:
        model, optimizer = prepared(2)
        train(model, optimizer, range(1))
        with copying_held() as may_copy:
            handle = save_checkpoint(tmp_path / "new", model, optimizer, async_save=True)
            if waits:
                may_copy.set()
                handle.wait_copied()
            if rank == 1:
                with torch.no_grad():
                    of(model, optimizer).mul_(2)
            may_copy.set()
            if waits:
                handle.wait()
                return
            with pytest.raises(dmuon.CheckpointError, match=r"was changed while .* wait_copied"):
                handle.wait()
        save_checkpoint(tmp_path / "new", model, optimizer)

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:no checkpoint was made")
def test_a_rank_without_memory_for_what_it_gets_is_an_error_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> NoReturn:
        raise OSError(errno.ENOMEM, "no memory")

    def body(rank: int) -> None:
        model, optimizer = prepared(2)
        with monkeypatch.context() as patch:
            if rank == 1:
                patch.setattr(gathering, "empty", no_memory)
            handle = save_checkpoint(tmp_path / "new", model, optimizer, async_save=True)
            with pytest.raises(dmuon.CheckpointError, match=r"rank 1: .*no memory"):
                handle.wait()
        save_checkpoint(tmp_path / "new", model, optimizer)

    run_ranks(2, body, timeout_s=30)  # far less than the timeout of a save


@pytest.mark.parametrize("refused", ["the checkpoint", "end of the checkpoint"])
def test_a_rank_that_can_start_no_thread_saves_before_it_goes_on(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(thread: threading.Thread) -> None:
        if thread.name.startswith(refused):
            raise RuntimeError("can't start new thread")
        start(thread)

    start = threading.Thread.start

    def body(rank: int) -> None:
        model, optimizer = prepared(2)
        with monkeypatch.context() as patch:
            if rank == 1:
                patch.setattr(threading.Thread, "start", no_thread)
            handle = save_checkpoint(tmp_path / "new", model, optimizer, async_save=True)
        assert rank == 0 or handle.done
        assert handle.wait().step == 0
        save_checkpoint(tmp_path / "next", model, optimizer)

    run_ranks(2, body, timeout_s=30)


def test_after_an_interrupted_save_the_next_one_works(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = prepared(1)
        with writing_held():
            main = threading.get_ident()
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
            threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                save_checkpoint(tmp_path / "new", model, optimizer)
        save_checkpoint(tmp_path / "new", model, optimizer)

    run_ranks(1, body, timeout_s=30)


def test_inference_mode_makes_no_difference(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = prepared(2)
        train(model, optimizer, range(2))
        expected = states(model, optimizer)
        with torch.inference_mode():
            save_checkpoint(tmp_path / "new", model, optimizer, async_save=True).wait()
        train(model, optimizer, range(2, 3))
        with torch.inference_mode():
            load_checkpoint(tmp_path / "new", model, optimizer)
        assert_same(states(model, optimizer), expected)
        train(model, optimizer, range(2, 3))

    run_ranks(2, body)


def test_two_models_cannot_save_to_one_folder_at_once(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        pairs = [prepared(2, seed=0), prepared(2, seed=1)]
        expected = states(*pairs[0])
        with writing_held() as may_write:
            first = save_checkpoint(tmp_path / "new", *pairs[0], async_save=True)
            with pytest.raises(dmuon.CheckpointError, match="another save is going on in it"):
                save_checkpoint(tmp_path / "new", *pairs[1])
            may_write.set()
            first.wait()
        load_checkpoint(tmp_path / "new", *pairs[1])
        assert_same(states(*pairs[1]), expected)

    run_ranks(2, body)


def test_the_next_save_waits_for_the_last(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = prepared(2)
        with writing_held() as may_write:
            first = save_checkpoint(tmp_path / "first", model, optimizer, async_save=True)
            threading.Timer(0.3, may_write.set).start()
            second = save_checkpoint(tmp_path / "second", model, optimizer, async_save=True)
            assert first.done
        second.wait()
        assert (tmp_path / "first" / MANIFEST_FILE).exists()

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:no checkpoint was made")
@pytest.mark.parametrize("waits", [(), (0,), (0, 1)], ids=["none", "one", "all"])
def test_an_error_in_the_background_is_raised_on_all_ranks_and_saving_works_again(
    waits: tuple[int, ...], tmp_path: Path
) -> None:
    """By ``wait`` where it is called, and by the next save unless all ranks have been told."""
    match = "rank 1: .*File too large"

    def body(rank: int) -> None:
        model, optimizer = prepared(2)
        save_checkpoint(tmp_path / "older", model, optimizer)
        with no_large_files() if rank == 1 else writing_held() as event:
            if event is not None:
                event.set()
            handle = save_checkpoint(tmp_path / "bad", model, optimizer, async_save=True)
            handle._is_over.wait()
        if rank in waits:
            with pytest.raises(dmuon.CheckpointError, match=match):
                handle.wait()
        if len(waits) < 2:
            with pytest.raises(dmuon.CheckpointError, match=match):
                save_checkpoint(tmp_path / "next", model, optimizer)
        assert [each.name for each in tmp_path.iterdir()] == ["older"]
        dist.barrier()
        save_checkpoint(tmp_path / "next", model, optimizer)
        load_checkpoint(tmp_path / "next", model, optimizer)

    run_ranks(2, body)


def test_a_folder_that_is_taken_away_while_it_is_written_is_never_committed(tmp_path: Path) -> None:
    folder = tmp_path / "new"

    def body(rank: int) -> None:
        model, optimizer = prepared(2)
        with writing_held() as may_write:
            handle = save_checkpoint(folder, model, optimizer, async_save=True)
            if rank == 0:
                folder.rename(tmp_path / "aside")
                folder.mkdir()
                (folder / "notes.txt").write_text("mine")
            dist.barrier()
            may_write.set()
            with pytest.raises(dmuon.CheckpointError, match="moved or removed while it was"):
                handle.wait()
        assert not (folder / MANIFEST_FILE).exists()
        assert (folder / "notes.txt").read_text() == "mine"
        save_checkpoint(tmp_path / "next", model, optimizer)

    run_ranks(2, body)


@pytest.mark.parametrize("second_beside", [True, False], ids=["both async", "second sync"])
def test_two_models_save_at_once(second_beside: bool, tmp_path: Path) -> None:
    """Though a rank is late with the first one, the answers of the two are not mixed up."""

    def body(rank: int) -> None:
        pairs = [prepared(2, seed=0), prepared(2, seed=1)]
        train(*pairs[1], range(1))
        with writing_held() as may_write:
            if rank == 1:
                may_write.set()
            first = save_checkpoint(tmp_path / "0", *pairs[0], async_save=True)
            if rank == 0:
                threading.Timer(0.3, may_write.set).start()
            second = save_checkpoint(tmp_path / "1", *pairs[1], async_save=second_beside)
            assert (first.wait().step, second.wait().step) == (0, 1)
        for number, pair in enumerate(pairs):
            expected = states(*pair)
            load_checkpoint(tmp_path / str(number), *pair)
            assert_same(states(*pair), expected)

    run_ranks(2, body)


def _ending_rank(rank: int, store: str, folder: Path, destroys: bool) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    model, optimizer = prepared(2)
    with copying_held() as may_copy:
        save_checkpoint(folder / "new", model, optimizer, async_save=True)
        if destroys:
            dist.barrier()
            dist.destroy_process_group()
        may_copy.set()


@pytest.mark.parametrize("destroys", [True, False], ids=["groups destroyed", "groups left"])
def test_a_script_that_ends_without_waiting_still_commits(destroys: bool, tmp_path: Path) -> None:
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as scratch:
        args = (f"{scratch}/store", tmp_path, destroys)
        ranks = [context.Process(target=_ending_rank, args=(rank, *args)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
            assert process.exitcode == 0
    assert read_manifest(tmp_path / "new").step == 0
