"""From the laps of all ranks to ratios: pure functions of what was measured."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dmuon.bench.clock import Laps
from dmuon.bench.measure import RankReport
from dmuon.bench.settings import ADAMW, ALONE, DMUON, OTHER_MUONS, Settings

PHASES = Laps._fields
_SAME_START_NATS = 1e-2  # the first losses differ by rounding alone, also in bfloat16

Blocks = Mapping[str, Sequence[Sequence[float]]]  # by contender, a round, a step


def summarise(
    reports: Sequence[RankReport], settings: Settings, tolerances: Mapping[str, float]
) -> dict[str, Any]:
    """One run of some number of ranks as plain data.

    All times but ``step_seconds`` and ``cpu_seconds`` are ratios.
    """
    num_steps = settings.steps * settings.repeats
    first = reports[0]
    names = settings.contenders
    seconds = {name: slowest(reports, name, "step") for name in names}
    base = [statistics.median(block) for block in seconds[ADAMW]]
    kinds = sorted({kind for report in reports for kind in report.wire_bytes})
    wire = {k: max(report.wire_bytes.get(k, 0) for report in reports) / num_steps for k in kinds}
    done = [report.newton_schulz / num_steps for report in reports]
    return {
        "ranks": len(reports),
        "tokens": settings.tokens_over(len(reports)),
        "step_ratio": {name: ratio(seconds, name, ADAMW) for name in names if name != ADAMW},
        "best_other": best_other(seconds, {n: slowest(reports, n, "optimizer") for n in names}),
        "phases": {name: _phases(reports, name, base) for name in names},
        "cpu_seconds": {name: _cpu_seconds(reports, name) for name in names},
        "payload_bytes": {name: _payload(reports, name) for name in names},
        "sent_bytes": {name: _sent(reports, name, num_steps) for name in names},
        "wire_bytes": {kind: round(number) for kind, number in wire.items()},
        "broadcast_floor_bytes": broadcast_floor(
            len(reports), first.facts.dedicated_bytes, settings.layers, settings.reshard
        ),
        "newton_schulz_per_step": sum(done),
        "newton_schulz_per_flop": first.facts.newton_schulz_per_flop,
        "optimizer_per_products": optimizer_per_products(reports),
        "peak_bytes": {name: max(report.peak_bytes[name] for report in reports) for name in names},
        "losses": first.losses,
        "differences": first.differences,
        "tolerances": dict(tolerances),
        "parity": parity(first.losses, first.differences, tolerances),
        "step_seconds": seconds,
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, tenths, quartiles and extremes."""
    ordered = sorted(values)
    tenths, quartiles = [ordered[0]] * 9, [ordered[0]] * 3
    if len(ordered) > 1:
        tenths = statistics.quantiles(ordered, n=10, method="inclusive")
        quartiles = statistics.quantiles(ordered, n=4, method="inclusive")
    return {
        "median": statistics.median(ordered),
        "tenths": [tenths[0], tenths[-1]],
        "quartiles": [quartiles[0], quartiles[2]],
        "min": ordered[0],
        "max": ordered[-1],
    }


def ratio(blocks: Blocks, name: str, unit: str) -> dict[str, Any]:
    """The spread over rounds of one contender's median step over that of another."""
    rounds = [
        statistics.median(block) / statistics.median(other)
        for block, other in zip(blocks[name], blocks[unit], strict=True)
    ]
    return {**spread(rounds), "rounds": rounds}


def best_other(steps: Blocks, optimizers: Blocks) -> dict[str, Any] | None:
    """DMuon over the other Muon with the shortest step; None when there is no other."""
    others = [name for name in steps if name in OTHER_MUONS]
    if not others:
        return None
    best = min(others, key=lambda name: ratio(steps, name, ADAMW)["median"])
    return {
        "name": best,
        "step_ratio": ratio(steps, DMUON, best),
        "optimizer_ratio": ratio(optimizers, DMUON, best),
    }


def broadcast_floor(num_ranks: int, dedicated_bytes: int, num_layers: int, reshard: bool) -> int:
    """Payload in bytes that each rank must take part in a step so that all see every matrix.

    Once for forward, and once more for backward when the weights were freed, which those of the
    last of the layers, all of one size, need not be; none when alone.
    """
    passes = 2 * num_layers - 1 if reshard else num_layers
    return 0 if num_ranks == 1 else dedicated_bytes // num_layers * passes


def optimizer_per_products(reports: Sequence[RankReport]) -> float:
    """DMuon's optimizer phase over the matrix products of Newton-Schulz alone.

    Of the rank with the most products; the phase is the median over all steps, and has in it
    momentum, weight update, AdamW for the rest, publish, and waiting for other ranks.
    """
    busiest = max(reports, key=lambda report: report.product_seconds)
    laps = [lap.optimizer for one in busiest.rounds for lap in one[DMUON].laps]
    return statistics.median(laps) / busiest.product_seconds


def parity(
    losses: Mapping[str, Sequence[float]],
    differences: Mapping[str, float],
    tolerances: Mapping[str, float],
) -> dict[str, bool]:
    """Whether all contenders trained, and all Muons the same.

    That is: the same start, finite losses, an end below the start; weights within tolerances.
    """
    starts = [each[0] for each in losses.values()]
    return {
        "same_start": max(starts) - min(starts) < _SAME_START_NATS,
        "finite": all(math.isfinite(loss) for each in losses.values() for loss in each),
        "falling": all(each[-1] < each[0] for each in losses.values()),
        "same_weights": all(differences[name] <= tolerances[name] for name in differences),
    }


def loss_difference(runs: Sequence[dict[str, Any]]) -> float:
    """The largest difference of a loss between numbers of ranks, in nats; NaN when one is NaN."""
    differences = [
        abs(one - other)
        for run in runs
        for name, losses in run["losses"].items()
        if name != ALONE  # of which each rank trains its own
        for one, other in zip(losses, runs[0]["losses"][name], strict=True)
    ]
    return max(differences, key=lambda each: (math.isnan(each), each))


def scaling(runs: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """By contender, tokens a second with each number of ranks over those with the first."""

    def tokens_per_second(run: dict[str, Any], name: str) -> float:
        steps = [step for block in run["step_seconds"][name] for step in block]
        return run["tokens"] / statistics.median(steps)

    return {
        name: [tokens_per_second(run, name) / tokens_per_second(runs[0], name) for run in runs]
        for name in runs[0]["step_seconds"]
    }


def slowest(reports: Sequence[RankReport], name: str, phase: str) -> list[list[float]]:
    """Of each step of each round: the slowest rank's, since the next barrier waits for it."""
    rounds = zip(*(report.rounds for report in reports), strict=True)
    return [
        [
            max(getattr(laps, phase) for laps in step)
            for step in zip(*(each[name].laps for each in one), strict=True)
        ]
        for one in rounds
    ]


def _phases(reports: Sequence[RankReport], name: str, base: Sequence[float]) -> dict[str, float]:
    """Mean over ranks of each phase in units of AdamW's step of the same round; median over all."""
    samples: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for index, unit in enumerate(base):
        for step in zip(*(report.rounds[index][name].laps for report in reports), strict=True):
            for phase in PHASES:
                mean = statistics.fmean(getattr(laps, phase) for laps in step)
                samples[phase].append(mean / unit)
    return {phase: statistics.median(values) for phase, values in samples.items()}


def _cpu_seconds(reports: Sequence[RankReport], name: str) -> dict[str, float]:
    """Of each phase, all ranks together; median over all steps."""
    ranks = [[cpu for one in report.rounds for cpu in one[name].cpu] for report in reports]
    return {
        phase: statistics.median(
            sum(getattr(cpu, phase) for cpu in step) for step in zip(*ranks, strict=True)
        )
        for phase in PHASES
    }


def _payload(reports: Sequence[RankReport], name: str) -> dict[str, int]:
    """Of one step by kind, on the rank that hands over most of it."""
    kinds = sorted({kind for report in reports for kind in report.payload[name]})
    return {kind: max(report.payload[name].get(kind, 0) for report in reports) for kind in kinds}


def _sent(reports: Sequence[RankReport], name: str, num_steps: int) -> float | None:
    """Of a step, all ranks together; None where nobody counts."""
    counts = [one[name].sent for report in reports for one in report.rounds]
    known = [count for count in counts if count is not None]
    return sum(known) / num_steps if len(known) == len(counts) else None
