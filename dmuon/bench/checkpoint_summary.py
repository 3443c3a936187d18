"""From what every rank has timed to rates, with their spread, and the table of them."""

import statistics
from collections.abc import Sequence
from typing import Any

from dmuon.bench.checkpoint_contenders import Owners, Sharded
from dmuon.bench.summary import spread

_MIB = 2**20
_TIMES = ("save_s", "blocked_s", "async_s", "load_s", "cold_load_s")
_RATES = ("save_s", "async_s", "load_s", "cold_load_s")


def summarise(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each way the medians over rounds of the slowest rank, and rates relative to torch's.

    A rate is taken within a round and then summed up, since a disk changes from round to round.
    Memory is that of the rank that needs most.
    """
    rounds = list(zip(*(report["timed"] for report in reports), strict=True))
    turns = {
        name: [_of_round(each) for each in rounds if each[0]["way"] == name]
        for name in dict.fromkeys(each[0]["way"] for each in rounds)
    }
    ways = {name: _way(mine, turns[Sharded.name]) for name, mine in turns.items()}
    return {"ways": ways, "load_other_mesh": _other_mesh([r["meshes"] for r in reports])}


def _of_round(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    worst = {
        key: None if ranks[0][key] is None else max(rank[key] for rank in ranks)
        for key in (*_TIMES, "peak_bytes")
    }
    return {**ranks[0], **worst}


def _way(mine: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> dict[str, Any]:
    writers = mine[-1]["written_bytes"]
    medians = {
        key: None if mine[0][key] is None else statistics.median(turn[key] for turn in mine)
        for key in (*_TIMES, "peak_bytes")
    }
    rates = {
        key: spread([_rate(turn, of, key) for turn, of in zip(mine, base, strict=True)])
        for key in _RATES
        if mine[0][key] is not None
    }
    return {
        "bytes": mine[-1]["num_bytes"],
        "most_written_over_mean": max(writers) * len(writers) / sum(writers),
        **medians,
        "rates": rates,
        "blocked_of_save": None
        if mine[0]["blocked_s"] is None
        else spread([turn["blocked_s"] / turn["save_s"] for turn in mine]),
    }


def _rate(turn: dict[str, Any], of: dict[str, Any], key: str) -> float:
    return float((turn["num_bytes"] / turn[key]) / (of["num_bytes"] / of[key]))


def _other_mesh(reports: Sequence[Sequence[Sequence[float]]]) -> dict[str, Any] | None:
    """Loads of files of another mesh over those of this one, in turns."""
    turns = [
        [max(times) for times in zip(*turn, strict=True)] for turn in zip(*reports, strict=True)
    ]
    return spread([other / own for own, other in turns]) if turns else None


def render(result: dict[str, Any]) -> str:
    """The table."""
    lines = [
        f"{result['parameters'] / 1e6:.0f}M parameters, {result['rounds']} rounds; rates in bytes "
        "relative to torch.distributed.checkpoint in the same round: median, (least to most). Its "
        "bytes differ: AdamW keeps two moments of every matrix",
        f"{'ranks':>5}  {'way':26} {'MiB':>5}"
        + "".join(f"{head:>20}" for head in ("save", "async", "load", "cold", "blocked/save"))
        + f"{'most/mean':>11}{'peak/bytes':>11}",
    ]
    for run in result["runs"]:
        for name, way in run["ways"].items():
            cells = [*(way["rates"].get(key) for key in _RATES), way["blocked_of_save"]]
            lines.append(
                f"{run['ranks']:>5}  {name:26} {way['bytes'] / _MIB:5.0f}"
                + "".join(f"{_cell(each):>20}" for each in cells)
                + f"{way['most_written_over_mean']:11.2f}{way['peak_bytes'] / way['bytes']:11.2f}"
            )
        ours = run["ways"][Owners.name]
        hash_s = ours["bytes"] / run["ranks"] / result["sha256_bytes_per_s"]
        sums_s = ours["bytes"] / run["ranks"] / result["checksum_bytes_per_s"]
        lines.append(
            f"{run['ranks']:>5}  of a rank's share, on a core of its own, SHA-256 is "
            f"{hash_s / ours['save_s']:.0%} of our save, "
            f"the checksum {sums_s / ours['load_s']:.0%} of our load"
        )
        if run["load_other_mesh"] is not None:
            what = "dmuon, written on another mesh"
            lines.append(f"{run['ranks']:>5}  {what}: load takes {_cell(run['load_other_mesh'])} x")
    return "\n".join(lines)


def _cell(each: dict[str, Any] | None) -> str:
    return "" if each is None else f"{each['median']:.2f} ({each['min']:.2f} to {each['max']:.2f})"
