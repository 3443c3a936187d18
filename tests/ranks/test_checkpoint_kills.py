"""Ranks killed in the middle of a save: what is committed is whole, the rest is no checkpoint.

The victim kills itself (or everybody) with SIGKILL before it runs a given line of the checkpoint
package, in whatever thread, counted over several saves; the number is drawn from a seed.
"""

import multiprocessing as mp
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks_runner import run_ranks
from wrapped import make_mesh, prepare, train

import dmuon
import dmuon.checkpoint
from dmuon import owner_map
from dmuon.checkpoint.loading import load_checkpoint
from dmuon.checkpoint.manifest import MANIFEST_FILE
from dmuon.checkpoint.saving import save_checkpoint
from dmuon.checkpoint.unfinished import MARK_FILE

PACKAGE = str(Path(dmuon.checkpoint.__file__).parent)
NUM_SAVES = 3
NUM_ROUNDS = 6  # for each kind
NUM_RANKS = 2
FORK = mp.get_context("fork")


def count_lines(kill_at: int | None, kill: Callable[[], None]) -> list[int]:
    """Count the lines of the package that run from now on in this process; kill at one of them."""
    count = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == kill_at:
                kill()
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    return count


def save_often(model: torch.nn.Module, optimizer: dmuon.Muon, folder: Path, beside: bool) -> None:
    for step in range(NUM_SAVES):
        path = folder / f"step-{step}"
        handle = save_checkpoint(path, model, optimizer, step=step, async_save=beside)
    handle.wait()


def saving_rank(
    rank: int, store: str, folder: Path, beside: bool, kill_at: int | None, group: Any, out: Any
) -> None:
    group[rank] = os.getpid()
    owner_map.CONNECT_TIMEOUT = timedelta(seconds=10)  # when one dies before it has joined
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS, init_method=f"file://{store}")
    model = prepare(make_mesh(NUM_RANKS))
    optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
    train(model, optimizer, range(1))

    def kill() -> None:
        for pid in group if kill_at is not None and kill_at % 3 == 0 else []:
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    lines = count_lines(kill_at, kill)
    failure = None
    try:
        save_often(model, optimizer, folder, beside)
    except Exception as error:
        failure = error
    sys.settrace(None)
    out.send((failure, lines[0]))
    dist.destroy_process_group()


def save_round(folder: Path, beside: bool, victim: int, kill_at: int | None) -> list[Any]:
    """What each rank reports; None for one that was killed."""
    with tempfile.TemporaryDirectory() as scratch:
        group = FORK.Array("i", NUM_RANKS, lock=False)
        readers: list[Connection] = []
        processes = []
        for rank in range(NUM_RANKS):
            reader, writer = FORK.Pipe(duplex=False)
            mine = kill_at if rank == victim else None
            args = (rank, f"{scratch}/store", folder, beside, mine, group, writer)
            processes.append(FORK.Process(target=saving_rank, args=args))
            processes[-1].start()
            writer.close()
            readers.append(reader)
        reports = []
        for reader in readers:
            assert reader.poll(60), "a rank neither ended nor was killed"
            try:
                reports.append(reader.recv())
            except EOFError:
                reports.append(None)
        for process in processes:
            process.join(60)
            assert process.exitcode is not None, "a rank does not end"
        return reports


def check_all(folders: list[Path]) -> None:
    """Every folder with a manifest loads, every other one is refused by name."""

    def body(rank: int) -> None:
        model = prepare(make_mesh(NUM_RANKS), seed=1)
        optimizer = dmuon.Muon(model)
        for folder in folders:
            if (folder / MANIFEST_FILE).exists():
                loaded = load_checkpoint(folder, model, optimizer)
                assert folder.name == f"step-{loaded.step}"
            else:
                with pytest.raises(dmuon.CheckpointError, match=str(folder)):
                    load_checkpoint(folder, model, optimizer)

    run_ranks(NUM_RANKS, body)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def save_again(folders: list[Path]) -> None:
    """To the same paths, as a script does that resumes; nothing that a kill left is lost."""
    left = {folder: contents(folder) for folder in folders}

    def body(rank: int) -> None:
        model = prepare(make_mesh(NUM_RANKS))
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        losses = train(model, optimizer, range(2))
        for folder, held in left.items():
            says = pytest.warns(UserWarning, match=f"{folder}.unfinished-1")
            with says if rank == 0 and held.keys() > {MARK_FILE} else nullcontext():
                save_checkpoint(folder, model, optimizer, async_save=True).wait()
        for folder in left:
            assert load_checkpoint(folder, model, optimizer).step == 2
        assert train(model, optimizer, range(1)) != losses[:1]

    run_ranks(NUM_RANKS, body)
    moved = [held for held in left.values() if held.keys() > {MARK_FILE}]
    assert any(name != MARK_FILE for held in moved for name in held), "no kill left a file"
    for folder, held in left.items():
        aside = folder.with_name(f"{folder.name}.unfinished-1")
        assert (contents(aside) if aside.exists() else {}) == (held if held in moved else {})
        assert not (folder / MARK_FILE).exists()


@pytest.mark.parametrize("beside", [False, True], ids=["sync", "async"])
def test_a_kill_at_any_line_leaves_whole_checkpoints_and_folders_that_are_none(
    beside: bool, tmp_path: Path
) -> None:
    reports = save_round(tmp_path / "all", beside, 0, None)
    assert [failure for failure, _ in reports] == [None, None]
    num_lines = [lines for _, lines in reports]
    rng = random.Random(f"kills {beside}")
    num_unfinished = 0
    for number in range(NUM_ROUNDS):
        folder, victim = tmp_path / str(number), rng.randrange(NUM_RANKS)
        kill_at = rng.randrange(1, num_lines[victim])
        reports = save_round(folder, beside, victim, kill_at)
        where = f"round {number}: rank {victim} at line {kill_at} of {num_lines[victim]}"
        assert reports[victim] is None, where
        for failure, _ in filter(None, reports):
            known = (dmuon.CheckpointError, dmuon.CollectiveError)
            is_late = (
                failure is None and (folder / f"step-{NUM_SAVES - 1}/{MANIFEST_FILE}").exists()
            )
            assert is_late or isinstance(failure, known), f"{where}: {failure!r}"
        started = sorted(folder.glob("step-*"))
        for earlier in started[:-1]:
            assert (earlier / MANIFEST_FILE).exists(), f"{where}: {earlier}"
        num_unfinished += any(not (each / MANIFEST_FILE).exists() for each in started)
    assert num_unfinished, "no kill hit a save; the test would prove nothing"
    every = sorted(tmp_path.glob("*/step-*"))
    check_all(every)
    save_again([folder for folder in every if not (folder / MANIFEST_FILE).exists()])
