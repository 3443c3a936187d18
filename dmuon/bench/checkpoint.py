"""``python -m dmuon.bench.checkpoint``: saving and loading, all ways in turns, in one run."""

import argparse
import hashlib
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dmuon.bench import decoder
from dmuon.bench.checkpoint_contenders import (
    Gathered,
    Owners,
    OwnersUnhashed,
    Sharded,
    Way,
)
from dmuon.bench.contenders import Contender, make_adamw, make_dmuon
from dmuon.bench.ranks import Launch, RankError, rank_device, run_ranks
from dmuon.bench.settings import Settings
from dmuon.checkpoint.word_sums import WordSums

_MIB = 2**20
_KEPT = "for-another-mesh"
_TIMES = ("save_s", "blocked_s", "async_s", "load_s", "cold_load_s")


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


@dataclass(frozen=True)
class Plan:
    """What every rank is told."""

    settings: Settings
    folder: str
    rounds: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 0, or 1 when a rank failed."""
    parser = argparse.ArgumentParser(
        prog="python -m dmuon.bench.checkpoint",
        description="Saving and loading of weights and optimizer state: dmuon (with SHA-256 and a "
        "checksum, which loading compares), "
        "torch.distributed.checkpoint of fully_shard with AdamW, torch.save on rank 0, in turns.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, with commas")
    parser.add_argument("--width", type=int, default=1024, help="of the decoder")
    parser.add_argument("--layers", type=int, default=16, help="decoder blocks")
    parser.add_argument("--rounds", type=int, default=3, help="saves and loads of each way")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary one by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here")
    given = parser.parse_args(arguments)
    ranks = tuple(int(part) for part in given.ranks.split(","))
    settings = Settings(
        ranks=ranks,
        width=given.width,
        layers=given.layers,
        heads=max(1, given.width // 64),
        intermediate=given.width * 11 // 4 // 8 * 8,
        sequence=16,
        batch=max(ranks),
        timeout_s=1200,
    )
    try:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            result = _measure_all(Plan(settings, folder, given.rounds))
    except RankError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    print(_render(result))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def _measure_all(plan: Plan) -> dict[str, Any]:
    runs = []
    for number in plan.settings.ranks:
        print(f"measuring with ranks: {number} ...", file=sys.stderr, flush=True)
        threads = max(1, (os.cpu_count() or 1) // number)
        launch = Launch(number, "cpu", threads, plan.settings.timeout_s)
        reports = run_ranks(launch, measure, replace(plan))
        runs.append({"ranks": number, **_summarise(reports)})
    model = decoder.build(plan.settings)
    parameters = sum(param.numel() for param in model.parameters())
    return {
        "parameters": parameters,
        "rounds": plan.rounds,
        "sha256_bytes_per_s": _rate_of(hashlib.sha256),
        "checksum_bytes_per_s": _rate_of(WordSums().update),
        "runs": runs,
    }


def measure(rank: int, plan: Plan) -> dict[str, Any]:
    """On one rank: every way in turns, then our checkpoint of the run before. Collective."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    device = rank_device("cpu", rank)
    ours = make_dmuon(plan.settings, mesh, device)
    for group in ours.optimizer.param_groups:
        group.update({"ns_steps": 1} if group["algorithm"] == "muon" else {})
    theirs = make_adamw(plan.settings, mesh, device)
    for contender in (ours, theirs):
        _one_step(contender, plan.settings)
    ways: list[Way] = [Owners(ours), Sharded(theirs), OwnersUnhashed(ours), Gathered(ours)]
    folder = Path(plan.folder)
    turns = [_time(way, folder, plan.settings) for _ in range(1 + plan.rounds) for way in ways]
    timed = [asdict(turn) for turn in turns[len(ways) :]]  # the first round warms up
    other = None
    if (folder / _KEPT).exists():
        _remember(folder / _KEPT)  # as those that it is compared with
        loads = [_seconds(lambda: ways[0].load(folder / _KEPT)) for _ in range(1 + plan.rounds)]
        other = statistics.median(loads[1:])
    else:
        ways[0].save(folder / _KEPT)
    return {"timed": timed, "load_other_mesh_s": other}


def _forward_backward(contender: Contender, settings: Settings) -> None:
    tokens = torch.randint(0, settings.vocabulary, (1, settings.sequence + 1))
    contender.model(tokens).square().mean().backward()


def _one_step(contender: Contender, settings: Settings) -> None:
    """So that there is optimizer state to save."""
    _forward_backward(contender, settings)
    contender.optimizer.step()
    contender.optimizer.zero_grad()


def _time(way: Way, folder: Path, settings: Settings) -> Timed:
    saved, beside = folder / "saved", folder / "beside"
    watch = _PeakMemory()
    save_s = _seconds(lambda: way.save(saved))
    peak = watch.grown()
    sizes = {path.name: path.stat().st_size for path in sorted(saved.iterdir())}
    blocked_s = async_s = None
    if way.can_save_beside:
        blocked_s = _time_blocked(way, beside / "training", settings)
        alone = beside / "alone"
        async_s = _seconds(lambda: way.finish_save(way.start_save(alone)))
    _remember(saved)
    load_s = _seconds(lambda: way.load(saved))
    _forget(saved)
    cold_load_s = _seconds(lambda: way.load(saved))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(saved)
        shutil.rmtree(beside, ignore_errors=True)
    dist.barrier()
    times = (save_s, blocked_s, async_s, load_s, cold_load_s)
    return Timed(way.name, sum(sizes.values()), _by_writer(sizes), *times, peak)


def _time_blocked(way: Way, path: Path, settings: Settings) -> float:
    """How long a training waits for a save beside it, until it may change weights again."""
    started: list[Any] = []
    blocked_s = _seconds(lambda: started.append(way.start_save(path)))
    _forward_backward(way.contender, settings)
    blocked_s += _seconds(lambda: way.wait_copied(started[0]))
    way.finish_save(started[0])
    way.contender.optimizer.zero_grad()
    return blocked_s


def _rate_of(take: Callable[[bytes], object]) -> float:
    """Bytes that it takes in a second, with nothing beside it."""
    piece = bytes(2**24)
    start = time.perf_counter()
    for _ in range(8):
        take(piece)
    return 8 * len(piece) / (time.perf_counter() - start)


def _by_writer(sizes: dict[str, int]) -> list[int]:
    """The bytes of the files that carry a writer's number, as ours and those of torch do."""
    written: dict[str, int] = {}
    for name, size in sizes.items():
        if number := re.search(r"(\d+)-of-\d+\.safetensors$|^__(\d+)_", name):
            writer = number[1] or number[2]
            written[writer] = written.get(writer, 0) + size
    return list(written.values()) or [sum(sizes.values())]


def _remember(folder: Path) -> None:
    """Let the system have all of the files in memory; one rank reads for all."""
    if dist.get_rank() == 0:
        for path in folder.iterdir():
            with path.open("rb", buffering=0) as file:
                while file.read(_MIB):
                    pass


def _forget(folder: Path) -> None:
    """Let the system drop what it has of the files in memory, where it can."""
    for path in folder.iterdir() if hasattr(os, "posix_fadvise") else ():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _seconds(do: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    do()
    dist.barrier()
    return time.perf_counter() - start


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


def _summarise(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds of the slowest rank; memory of the rank that needs most."""
    rounds = list(zip(*(report["timed"] for report in reports), strict=True))
    ways: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(each[0]["way"] for each in rounds):
        mine = [each for each in rounds if each[0]["way"] == name]

        def median(key: str, mine: list[Any] = mine) -> float | None:
            worst = [max(rank[key] for rank in each) for each in mine if each[0][key] is not None]
            return statistics.median(worst) if worst else None

        writers = mine[-1][0]["written_bytes"]
        ways[name] = {
            "bytes": mine[-1][0]["num_bytes"],
            "most_written_over_mean": max(writers) * len(writers) / sum(writers),
            **{key: median(key) for key in _TIMES},
            "peak_bytes": median("peak_bytes"),
        }
    others = [r["load_other_mesh_s"] for r in reports if r["load_other_mesh_s"] is not None]
    return {"ways": ways, "load_other_mesh_s": max(others) if others else None}


def _render(result: dict[str, Any]) -> str:
    lines = [
        f"{result['parameters'] / 1e6:.0f}M parameters, {result['rounds']} rounds, medians; rates "
        "relative to torch.distributed.checkpoint of the same number of ranks (its bytes differ: "
        "AdamW keeps two moments of every matrix)",
        f"{'ranks':>5}  {'way':30} {'MiB':>7} {'save':>6} {'async':>6} {'load':>6} {'cold':>6} "
        f"{'blocked/save':>12} {'most/mean':>12} {'peak/bytes':>10}",
    ]
    for run in result["runs"]:
        base = run["ways"][Sharded.name]
        for name, way in run["ways"].items():
            keys = ("save_s", "async_s", "load_s", "cold_load_s")
            rates = " ".join(f"{_rate(way, base, key):>6}" for key in keys)
            blocked = way["blocked_s"]
            share = "" if blocked is None else f"{blocked / way['save_s']:.2f}"
            lines.append(
                f"{run['ranks']:>5}  {name:30} {way['bytes'] / _MIB:7.0f} {rates} {share:>12} "
                f"{way['most_written_over_mean']:12.2f} {way['peak_bytes'] / way['bytes']:10.2f}"
            )
        ours = run["ways"][Owners.name]
        hash_s = ours["bytes"] / run["ranks"] / result["sha256_bytes_per_s"]
        sums_s = ours["bytes"] / run["ranks"] / result["checksum_bytes_per_s"]
        lines.append(
            f"{run['ranks']:>5}  of a rank's share, on a core of its own, SHA-256 is "
            f"{hash_s / ours['save_s']:.0%} of our save, "
            f"the checksum {sums_s / ours['load_s']:.0%} of our load"
        )
        if run["load_other_mesh_s"] is not None:
            ratio = run["load_other_mesh_s"] / run["ways"][Owners.name]["load_s"]
            what = "dmuon, written on another mesh"
            lines.append(f"{run['ranks']:>5}  {what}: load takes {ratio:.2f}x")
    return "\n".join(lines)


def _rate(way: dict[str, Any], base: dict[str, Any], key: str) -> str:
    if way[key] is None or base[key] is None:
        return ""
    return f"{(way['bytes'] / way[key]) / (base['bytes'] / base[key]):.2f}"


if __name__ == "__main__":
    sys.exit(main())
