"""Storage that fails a save: one error on all ranks, nothing half-written, and training goes on."""

import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from mounts import in_process, mount_tmpfs, needs_mounts, own_mounts
from ranks_runner import run_ranks
from torch import nn
from wrapped import make_mesh, prepare, train

import dmuon
from dmuon.agreement import gather_objects
from dmuon.checkpoint.loading import load_checkpoint
from dmuon.checkpoint.saving import save_checkpoint

NUM_RANKS = 2


def prepared() -> tuple[nn.Module, dmuon.Muon]:
    model = prepare(make_mesh(NUM_RANKS))
    optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
    train(model, optimizer, range(1))
    return model, optimizer


def expect_refused(
    model: nn.Module, optimizer: dmuon.Muon, path: Path | str, match: str, beside: bool = False
) -> None:
    """The same error on every rank, and nothing left behind at ``path``."""
    before = listing(path)
    with pytest.raises(dmuon.CheckpointError, match=match) as caught:
        save_checkpoint(path, model, optimizer, async_save=beside).wait()
    texts = gather_objects(dmuon.dedication.of(model), str(caught.value))
    assert len(set(texts)) == 1, texts
    assert listing(path) == before


def listing(path: Path | str) -> list[str] | None:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return None


def expect_usable(model: nn.Module, optimizer: dmuon.Muon, older: Path, path: Path) -> None:
    """Training goes on, the next save works, and what was saved before is untouched."""
    before = train(model, optimizer, range(1, 3))
    save_checkpoint(path, model, optimizer)
    load_checkpoint(path, model, optimizer)
    load_checkpoint(older, model, optimizer)
    assert train(model, optimizer, range(1, 3)) == before


@needs_mounts
@pytest.mark.parametrize("beside", [False, True], ids=["sync", "async"])
def test_a_disk_that_is_full(beside: bool, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        disk = tmp_path / "disk"
        model, optimizer = prepared()
        save_checkpoint(disk / "older", model, optimizer)
        filler = disk / "filler"
        if rank == 0:
            stat = os.statvfs(disk)
            with filler.open("wb") as file:  # all but what one rank needs
                file.write(b"x" * (stat.f_bavail * stat.f_frsize - 150_000))
        gather_objects(dmuon.dedication.of(model), None)
        expect_refused(model, optimizer, disk / "new", "No space left on device", beside)
        if rank == 0:
            filler.unlink()
        gather_objects(dmuon.dedication.of(model), None)
        expect_usable(model, optimizer, disk / "older", disk / "new")

    def with_disk() -> None:
        own_mounts()
        (tmp_path / "disk").mkdir()
        mount_tmpfs(tmp_path / "disk", 4 * 2**20)
        run_ranks(NUM_RANKS, body)

    in_process(with_disk)


@needs_mounts
def test_a_disk_that_cannot_be_written() -> None:
    def body(rank: int) -> None:
        model, optimizer = prepared()
        expect_refused(model, optimizer, Path("/mnt/new"), "Read-only file system")
        expect_refused(model, optimizer, Path("/mnt"), "Read-only file system")
        losses = train(model, optimizer, range(1, 2))
        assert len(losses) == 1

    def with_disk() -> None:
        own_mounts()
        read_only = 1
        mount_tmpfs(Path("/mnt"), 2**20, read_only)
        run_ranks(NUM_RANKS, body)

    in_process(with_disk)


@needs_mounts
@pytest.mark.parametrize("sees_folder", [False, True], ids=["no folder", "another folder"])
def test_a_rank_that_has_other_storage_under_the_path(sees_folder: bool, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = prepared()
        shared = tmp_path / "shared"
        save_checkpoint(shared / "older", model, optimizer)
        if rank == 1:
            own_mounts()
            mount_tmpfs(shared, 2**20)
            if sees_folder:
                (shared / "new").mkdir()
        match = "must share the storage" if sees_folder else "rank 1: .*No such file or directory"
        with pytest.raises(dmuon.CheckpointError, match=match):
            save_checkpoint(shared / "new", model, optimizer)
        if rank == 0:
            assert [each.name for each in shared.iterdir()] == ["older"]
        with pytest.raises(dmuon.CheckpointError, match="there is no such file or folder"):
            load_checkpoint(shared / "older", model, optimizer)
        save_checkpoint(tmp_path / "next", model, optimizer)

    def with_mounts() -> None:
        own_mounts()
        (tmp_path / "shared").mkdir()
        run_ranks(NUM_RANKS, body)

    in_process(with_mounts)


@pytest.mark.parametrize("beside", [False, True], ids=["sync", "async"])
def test_files_that_may_not_grow_further_on_one_rank(beside: bool, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = prepared()
        save_checkpoint(tmp_path / "older", model, optimizer)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        expect_refused(model, optimizer, tmp_path / "new", "rank 1: .*File too large", beside)
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        expect_usable(model, optimizer, tmp_path / "older", tmp_path / "new")

    run_ranks(NUM_RANKS, body)


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()

    def body(rank: int) -> None:
        model, optimizer = prepared()
        save_checkpoint(tmp_path / "older", model, optimizer)
        expect_refused(model, optimizer, tmp_path / "older", "not empty; nothing is overwritten")
        expect_refused(model, optimizer, tmp_path / "used", "not empty; nothing is overwritten")
        expect_refused(model, optimizer, tmp_path / "file", "there is a file, or a link to nothing")
        expect_refused(model, optimizer, tmp_path / "file" / "new", "Not a directory")
        expect_refused(model, optimizer, tmp_path / ("long" * 100), "File name too long")
        with pytest.raises(dmuon.CheckpointError, match=r"ranks \[1\] .* to another path"):
            save_checkpoint(tmp_path / f"of-{rank}", model, optimizer)
        expect_refused(model, optimizer, "s3://bucket/new", "it is a URL.*dmuon checkpoint copy")
        with pytest.raises(dmuon.CheckpointError, match=r"it is a URL.*dmuon checkpoint copy"):
            load_checkpoint("s3://bucket/new", model)
        assert not Path("s3:").exists()
        os.chdir(tmp_path / ("used" if rank else "."))
        with pytest.raises(dmuon.CheckpointError, match=r"ranks \[1\] .* to another path"):
            save_checkpoint("relative", model, optimizer)
        names = {"empty", "file", "older", "used"}
        assert {each.name for each in tmp_path.iterdir()} == names
        expect_usable(model, optimizer, tmp_path / "older", tmp_path / "empty")

    run_ranks(NUM_RANKS, body)
    assert (tmp_path / "file").read_text() == "mine"
    assert [each.name for each in (tmp_path / "used").iterdir()] == ["notes.txt"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"extra": {"a": {"b": object()}}}, r"extra\['a'\]\['b'\] is a object: not plain data"),
    ({"extra": 5}, "extra must be a dictionary by text, got 5"),
    ({"step": -1}, "step must be a whole number of at least 0, got -1"),
    ({"step": "five"}, "step must be a whole number of at least 0, got 'five'"),
    ({"files": {"../evil": b""}}, "not a plain file name"),
    ({"files": {"manifest.json": b""}}, "has the name of one of its own"),
    ({"files": {"config.json": "text"}}, "must be given as bytes"),
    ({"files": ["config.json"]}, "files must be a dictionary by text"),
]


def test_what_the_caller_adds_is_checked_before_the_folder_is_made(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = prepared()
        for given, match in WRONG:
            for mine in (given, given if rank == 0 else {}):
                with pytest.raises(dmuon.CheckpointError, match=match):
                    save_checkpoint(tmp_path / "new", model, optimizer, **mine)
                assert not (tmp_path / "new").exists()
        for number, (given, _) in enumerate(WRONG):  # that of the first rank counts
            mine = {"step": 7, "extra": {"is": "mine"}, "files": {"a.txt": b"A"}}
            path = tmp_path / str(number)
            save_checkpoint(path, model, optimizer, **(given if rank else mine))
            loaded = load_checkpoint(path, model, optimizer)
            assert (loaded.step, loaded.extra) == (7, {"is": "mine"})
            assert (path / "a.txt").read_bytes() == b"A"

    run_ranks(NUM_RANKS, body)
