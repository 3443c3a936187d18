"""One way to save and load, timed once, on every rank."""

import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dmuon.bench.checkpoint_contenders import Way
from dmuon.bench.contenders import Contender
from dmuon.bench.settings import Settings


@dataclass(frozen=True)
class Timed:
    """What one way did on one rank, in one round.

    Attributes:
        way: its name.
        num_bytes: in its files, of all ranks.
        written_bytes: in the files of each writer.
        save_s: of a save that is waited for.
        blocked_s: that training waits for a save that goes on beside it, until the call returns
            and then before the next step may change weights; None without such.
        async_s: of such a save that is waited for at once.
        load_s: of a load, with files in the page cache.
        cold_load_s: of a load, with files on the disk alone.
        peak_bytes: by which the resident memory of this rank grew at most during the save.
    """

    way: str
    num_bytes: int
    written_bytes: list[int]
    save_s: float
    blocked_s: float | None
    async_s: float | None
    load_s: float
    cold_load_s: float
    peak_bytes: int


def time_way(way: Way, folder: Path, settings: Settings) -> Timed:
    """Save, save beside training, load from memory and from the disk. Collective.

    What takes memory is done twice in a row, and timed the second time: a virtual machine may give
    memory that was free for two seconds back to its host, and have it again at 2 s a GB.
    """
    saved, beside = folder / "saved", folder / "beside"
    watch = _PeakMemory()
    save_s = seconds(lambda: way.save(saved))
    peak = watch.grown()
    sizes = {path.name: path.stat().st_size for path in sorted(saved.iterdir())}
    way.load(saved)
    load_s = seconds(lambda: way.load(saved))
    _forget(saved)
    cold_load_s = seconds(lambda: way.load(saved))
    _remove(saved)
    blocked_s = async_s = None
    if way.can_save_beside:
        for _ in range(2):
            async_s = seconds(lambda: way.finish_save(way.start_save(beside)))
            _remove(beside)
        blocked_s = _time_blocked(way, beside, settings)
        _remove(beside)
    times = (save_s, blocked_s, async_s, load_s, cold_load_s)
    return Timed(way.name, sum(sizes.values()), _by_writer(sizes), *times, peak)


def _time_blocked(way: Way, path: Path, settings: Settings) -> float:
    """How long a training waits for a save beside it, until it may change weights again."""
    started: list[Any] = []
    blocked_s = seconds(lambda: started.append(way.start_save(path)))
    forward_backward(way.contender, settings)
    blocked_s += seconds(lambda: way.wait_copied(started[0]))
    way.finish_save(started[0])
    way.contender.optimizer.zero_grad()
    return blocked_s


def forward_backward(contender: Contender, settings: Settings) -> None:
    """A step up to its gradients, of the same tokens always."""
    tokens = torch.randint(0, settings.vocabulary, (1, settings.sequence + 1))
    contender.model(tokens).square().mean().backward()


def _by_writer(sizes: dict[str, int]) -> list[int]:
    """The bytes of the files that carry a writer's number, as ours and those of torch do."""
    written: dict[str, int] = {}
    for name, size in sizes.items():
        if number := re.search(r"(\d+)-of-\d+\.safetensors$|^__(\d+)_", name):
            writer = number[1] or number[2]
            written[writer] = written.get(writer, 0) + size
    return list(written.values()) or [sum(sizes.values())]


def _forget(folder: Path) -> None:
    """Let the system drop what it has of the files in memory, where it can."""
    for path in folder.iterdir() if hasattr(os, "posix_fadvise") else ():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(do: Callable[[], object]) -> float:
    """How long it takes until every rank has done it, with nothing left to be written before."""
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    start = time.perf_counter()
    do()
    dist.barrier()
    return time.perf_counter() - start


def _remove(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()


class _PeakMemory:
    """How much the resident memory of this process grew at most; Linux only, else zero."""

    def __init__(self) -> None:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM = VmRSS
        self._start = self._read("VmRSS")

    def grown(self) -> int:
        """Bytes above the start."""
        return max(0, self._read("VmHWM") - self._start)

    def _read(self, key: str) -> int:
        try:
            lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)
