"""``python -m dmuon.bench.checkpoint``: saving and loading, all ways in turns, in one run."""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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
from dmuon.bench.checkpoint_summary import render, summarise
from dmuon.bench.checkpoint_turn import Timed, forward_backward, seconds, time_way
from dmuon.bench.contenders import Contender, make_adamw, make_dmuon
from dmuon.bench.ranks import Launch, RankError, rank_device, run_ranks
from dmuon.bench.settings import Settings
from dmuon.checkpoint.word_sums import WordSums

_KEPT = "of-{}-ranks"


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
    print(render(result))
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
        runs.append({"ranks": number, **summarise(reports)})
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
    turns: list[Timed] = []
    for number in range(1 + plan.rounds):  # the first warms up
        first = (number - 1) % len(ways)  # none is always after the same other one
        in_turn = [*ways[first:], *ways[:first]]
        timed = [time_way(way, folder, plan.settings) for way in in_turn]
        turns += timed if number > 0 else []
    return {"timed": [asdict(turn) for turn in turns], "meshes": _time_meshes(ways[0], plan)}


def _time_meshes(way: Way, plan: Plan) -> list[tuple[float, float]]:
    """Seconds to load files of this mesh, and of the one measured before; empty for the first."""
    number = plan.settings.ranks.index(dist.get_world_size())
    folders = [Path(plan.folder) / _KEPT.format(n) for n in plan.settings.ranks[: number + 1]]
    way.save(folders[-1])
    times = []
    for _ in range(1 + plan.rounds if number > 0 else 0):
        own, other = (_load(way, folder) for folder in reversed(folders[-2:]))
        times.append((own, other))
    return times[1:]


def _load(way: Way, folder: Path) -> float:
    way.load(folder)  # now its files are in the page cache
    return seconds(lambda: way.load(folder))


def _one_step(contender: Contender, settings: Settings) -> None:
    """So that there is optimizer state to save."""
    forward_backward(contender, settings)
    contender.optimizer.step()
    contender.optimizer.zero_grad()


def _rate_of(take: Callable[[bytes], object]) -> float:
    """Bytes that it takes in a second, with nothing beside it."""
    piece = bytes(2**24)
    start = time.perf_counter()
    for _ in range(8):
        take(piece)
    return 8 * len(piece) / (time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
