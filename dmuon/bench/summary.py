"""From the laps of all ranks to ratios: pure functions of what was measured."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from dmuon.bench.clock import Laps
from dmuon.bench.contenders import ADAMW, DMUON
from dmuon.bench.measure import RankReport
from dmuon.bench.settings import Settings

PHASES = Laps._fields
_SAME_START_NATS = 1e-2  # the first losses differ by rounding alone, also in bfloat16


def summarise(reports: Sequence[RankReport], settings: Settings) -> dict[str, Any]:
    """One run of some number of ranks as plain data; all times but ``step_seconds`` are ratios."""
    num_steps = settings.steps * settings.repeats
    first = reports[0]
    seconds = {name: _step_seconds(reports, name) for name in (ADAMW, DMUON)}
    base = [statistics.median(block) for block in seconds[ADAMW]]
    ratios = [
        statistics.median(block) / unit for block, unit in zip(seconds[DMUON], base, strict=True)
    ]
    kinds = sorted({kind for report in reports for kind in report.wire_bytes})
    wire = {k: max(report.wire_bytes.get(k, 0) for report in reports) / num_steps for k in kinds}
    done = [report.newton_schulz / num_steps for report in reports]
    return {
        "ranks": len(reports),
        "step_ratio": {**spread(ratios), "rounds": ratios},
        "phases": {name: _phases(reports, name, base) for name in seconds},
        "wire_bytes": {kind: round(number) for kind, number in wire.items()},
        "broadcast_floor_bytes": broadcast_floor(
            len(reports), first.facts.dedicated_bytes, settings.reshard
        ),
        "newton_schulz_per_step": sum(done),
        "optimizer_per_products": optimizer_per_products(reports),
        "peak_bytes": {name: _most(reports, name) for name in seconds},
        "losses": first.losses,
        "parity": parity(first.losses),
        "step_seconds": seconds,
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and extremes."""
    ordered = sorted(values)
    quartiles = [ordered[0]] * 3
    if len(ordered) > 1:
        quartiles = statistics.quantiles(ordered, n=4, method="inclusive")
    return {
        "median": statistics.median(ordered),
        "quartiles": [quartiles[0], quartiles[2]],
        "min": ordered[0],
        "max": ordered[-1],
    }


def broadcast_floor(num_ranks: int, dedicated_bytes: int, reshard: bool) -> int:
    """Payload in bytes that each rank must take part in a step so that all see every matrix.

    Once for forward, and once more for backward when the weights were freed; none when alone.
    """
    return 0 if num_ranks == 1 else dedicated_bytes * (2 if reshard else 1)


def optimizer_per_products(reports: Sequence[RankReport]) -> float:
    """DMuon's optimizer phase over the matrix products of Newton-Schulz alone.

    Of the rank with the most products; the phase is the median over all steps, and has in it
    momentum, weight update, AdamW for the rest, publish, and waiting for other ranks.
    """
    busiest = max(reports, key=lambda report: report.product_seconds)
    laps = [lap.optimizer for one in busiest.rounds for lap in one[DMUON]]
    return statistics.median(laps) / busiest.product_seconds


def parity(losses: dict[str, list[float]]) -> dict[str, bool]:
    """Whether both contenders trained: the same start, finite losses, an end below the start."""
    return {
        "same_start": abs(losses[ADAMW][0] - losses[DMUON][0]) < _SAME_START_NATS,
        "finite": all(math.isfinite(loss) for each in losses.values() for loss in each),
        "falling": all(each[-1] < each[0] for each in losses.values()),
    }


def loss_difference(runs: Sequence[dict[str, Any]]) -> float:
    """The largest difference of a loss between numbers of ranks, in nats; NaN when one is NaN."""
    differences = [
        abs(one - other)
        for run in runs
        for name, losses in run["losses"].items()
        for one, other in zip(losses, runs[0]["losses"][name], strict=True)
    ]
    return max(differences, key=lambda each: (math.isnan(each), each))


def _step_seconds(reports: Sequence[RankReport], name: str) -> list[list[float]]:
    """Of each step of each round: the slowest rank's, since the next barrier waits for it."""
    rounds = zip(*(report.rounds for report in reports), strict=True)
    return [
        [
            max(laps.step for laps in step)
            for step in zip(*(each[name] for each in one), strict=True)
        ]
        for one in rounds
    ]


def _phases(reports: Sequence[RankReport], name: str, base: Sequence[float]) -> dict[str, float]:
    """Mean over ranks of each phase in units of AdamW's step of the same round; median over all."""
    samples: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for index, unit in enumerate(base):
        for step in zip(*(report.rounds[index][name] for report in reports), strict=True):
            for phase in PHASES:
                mean = statistics.fmean(getattr(laps, phase) for laps in step)
                samples[phase].append(mean / unit)
    return {phase: statistics.median(values) for phase, values in samples.items()}


def _most(reports: Sequence[RankReport], name: str) -> int | None:
    """The peak of the rank that needs most; None where it was not counted."""
    peaks = [report.peak_bytes[name] for report in reports]
    return max((peak for peak in peaks if peak is not None), default=None)
