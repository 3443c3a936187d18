"""The main job on a disk that is full for a while: it trains on, says so, and loses nothing."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from cluster import driver
from mounts import in_process, mount_tmpfs, needs_mounts, own_mounts

pytestmark = [pytest.mark.cluster, needs_mounts]

DISK_BYTES = 48 * 2**20
LINES_BYTES = 300_000
"""Enough for metrics and the journal, and not for a checkpoint."""
STEPS = 150


def fill(disk: Path, all_but: int = 0) -> Path:
    """Take the room on a disk; return the file to delete for having it back."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file, suppress(OSError):  # the job writes meanwhile
        stat = os.statvfs(disk)
        file.write(b"x" * max(0, stat.f_bavail * stat.f_frsize - all_but))
        while not all_but:
            file.write(b"x" * 4096)
    return filler


def on_small_disk(
    text: Path, folder: Path, body: Callable[[driver.Run, Path], None], steps: int = STEPS
) -> None:
    """Run ``body`` with a job whose storage is a disk of its own."""

    def with_disk() -> None:
        own_mounts()
        run = driver.make_run(folder, text, steps=steps)
        run.folder.parent.mkdir()
        mount_tmpfs(run.folder.parent, DISK_BYTES)
        body(run, run.folder.parent)

    in_process(with_disk)


def test_a_launch_on_a_full_disk_says_what_to_do(text, tmp_path):
    def body(run: driver.Run, disk: Path) -> None:
        run.folder.mkdir()
        for room in (0, 4096):  # nothing at all; a page, enough for a first look
            filler = fill(disk, room)
            code, output = driver.run("run", run.job)
            assert code == 1, output
            assert "No space left on device" in output
            assert str(disk) in output
            assert "Traceback" not in output
            filler.unlink()

    on_small_disk(text, tmp_path, body)


def saved(run: driver.Run) -> list[int]:
    return [event["step"] for event in run.events("checkpoint_saved")]


def test_training_goes_on_while_the_disk_is_full_and_all_is_there_afterwards(text, tmp_path):
    def body(run: driver.Run, disk: Path) -> None:
        process = driver.start("run", run.job)
        driver.wait_until(lambda: len(saved(run)) >= 2, process)
        filler = fill(disk, LINES_BYTES)  # no room for a checkpoint
        driver.wait_until(lambda: run.events("checkpoint_failed"), process)
        before = saved(run)
        fill(disk)  # nor for a line
        full_at = time.time()
        time.sleep(3)
        filler.unlink()
        free_at = time.time()
        driver.wait_until(lambda: saved(run)[-1] > before[-1], process)
        code, output = driver.finish(process)
        assert code == 0, output

        (failed, *_) = run.events("checkpoint_failed")
        assert "No space left on device" in failed["problem"]
        assert f"the checkpoint of step {failed['step']} could not be saved" in output
        assert saved(run)[-1] == STEPS
        assert sorted(run.metrics()) == list(range(1, STEPS + 1))
        times = [line["time"] for line in run.lines("metrics.jsonl")]
        assert any(full_at < each < free_at for each in times), "training waited for the disk"
        assert not run.replays()
        assert not run.events("restarted")
        assert "not all is told" not in output

    on_small_disk(text, tmp_path, body)


def test_a_training_that_ends_on_a_full_disk_says_what_to_do_and_goes_on_from_there(text, tmp_path):
    def body(run: driver.Run, disk: Path) -> None:
        process = driver.start("run", run.job)
        driver.wait_until(lambda: len(saved(run)) >= 2, process)
        filler = fill(disk)
        code, output = driver.finish(process)
        assert code == 1, output
        assert "No space left on device" in output
        assert "launch the job again" in output
        newest = saved(run)[-1]
        filler.unlink()
        code, output = driver.run("run", run.job)
        assert code == 0, output
        assert f"train from step {newest}" in output
        assert saved(run)[-1] == driver.STEPS
        assert sorted(run.metrics()) == list(range(1, driver.STEPS + 1))

    on_small_disk(text, tmp_path, body, driver.STEPS)
