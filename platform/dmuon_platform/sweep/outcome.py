"""What came of a sweep: each point by its run folder, and each setting over its seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from dmuon_platform.errors import Diverged
from dmuon_platform.event_facts import whole
from dmuon_platform.events import Journal
from dmuon_platform.metric_names import BITS_PER_BYTE
from dmuon_platform.sweep.grid import Grid, Point, Settings, last_part
from dmuon_platform.text_table import text_table


@dataclass(frozen=True)
class Outcome:
    """What came of one point.

    Attributes:
        point: It.
        evaluation: After the last step; None where it diverged.
        seconds: That it took.
    """

    point: Point
    evaluation: Mapping[str, float] | None
    seconds: float


@dataclass(frozen=True)
class Row:
    """One setting over all its seeds.

    Attributes:
        grid: Number of its grid.
        settings: It.
        values: Held-out bits a byte of each seed; those that diverged are not there.
        num_diverged: How many those are.
    """

    grid: int
    settings: Settings
    values: tuple[float, ...]
    num_diverged: int

    @property
    def middle(self) -> float:
        """The mean over seeds; infinite where one has diverged, which is as bad as it gets."""
        return float("inf") if self.num_diverged or not self.values else mean(self.values)


def outcome_of(point: Point) -> Outcome | None:
    """Return what came of a point, None as long as it is not at its end."""
    journal = Journal(point.spec.run_dir)
    trained, ended = journal.last("trained"), journal.last("ended")
    launched = journal.last("launched")
    if launched is None or ended is None or ended["time"] < launched["time"]:
        return None
    seconds = ended["time"] - launched["time"]
    if ended.get("exit_code") == Diverged.exit_code:
        return Outcome(point, None, seconds)
    if trained is None or (whole(trained, "step") or 0) != point.spec.num_steps:
        return None
    return Outcome(point, trained["evaluation"], seconds)


def rows_of(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return the settings, in the order of the first seed."""
    by_settings: dict[tuple[int, tuple[tuple[str, str], ...]], list[Outcome]] = {}
    for outcome in outcomes:
        key = (outcome.point.grid, tuple(outcome.point.settings.items()))
        by_settings.setdefault(key, []).append(outcome)
    return [
        Row(
            grid,
            dict(settings),
            tuple(
                each.evaluation[BITS_PER_BYTE] for each in several if each.evaluation is not None
            ),
            sum(each.evaluation is None for each in several),
        )
        for (grid, settings), several in by_settings.items()
    ]


def length_of(outcomes: Sequence[Outcome]) -> str:
    """Say how long each training is."""
    specs = [each.point.spec for each in outcomes]
    steps = sorted({spec.num_steps for spec in specs})
    tokens = sorted({spec.num_steps * spec.tokens_per_step for spec in specs})
    shown = (" to ".join(f"{n:,}" for n in (*few[:1], *few[1:][-1:])) for few in (steps, tokens))
    return "{} steps, {} tokens each".format(*shown)


def best_of(rows: Sequence[Row], grid: int) -> Row | None:
    """Return the best setting of a grid, None where all have diverged."""
    mine = [row for row in rows if row.grid == grid]
    best = min(mine, key=lambda row: row.middle)
    return best if best.values and not best.num_diverged else None


def edges_of(best: Row, grid: Grid) -> list[str]:
    """Return the keys of which the best value is the lowest or highest that was tried."""
    found = []
    for key in grid.varied:
        try:
            numbers = [float(value) for value in grid.axes[key]]
        except ValueError:  # words have no edge
            continue
        if float(best.settings[key]) in (min(numbers), max(numbers)):
            found.append(key)
    return found


def table(rows: Sequence[Row], grids: Sequence[Grid]) -> str:
    """Return a table for people, with a star at the best of each grid."""
    best = [best_of(rows, number) for number in range(len(grids))]
    lines = []
    for row in rows:
        shown = ", ".join(f"{last_part(key)} {v}" for key, v in row.settings.items())
        star = "*" if row is best[row.grid] else ""
        lines.append((shown, *_numbers(row), star))
    return text_table(("settings", "bits/byte", "lowest", "highest", "seeds", "best"), lines)


def _numbers(row: Row) -> tuple[str, str, str, str]:
    seeds = str(len(row.values) + row.num_diverged)
    if row.num_diverged:
        return ("diverged", "", "", f"{row.num_diverged} of {seeds}")
    return (f"{row.middle:.4f}", f"{min(row.values):.4f}", f"{max(row.values):.4f}", seeds)


def plain(outcomes: Sequence[Outcome], grids: Sequence[Grid]) -> dict[str, Any]:
    """Return everything as plain data."""
    rows = rows_of(outcomes)
    summary = []
    for number, grid in enumerate(grids):
        best = best_of(rows, number)
        summary.append(
            {
                "axes": {key: list(values) for key, values in grid.axes.items()},
                "best": None if best is None else dict(best.settings),
                "bits_per_byte": None if best is None else best.middle,
                "at_the_edge": [] if best is None else edges_of(best, grid),
            }
        )
    points = [
        {
            "name": each.point.spec.name,
            "grid": each.point.grid,
            "settings": dict(each.point.settings),
            "seed": each.point.seed,
            "steps": each.point.spec.num_steps,
            "tokens": each.point.spec.num_steps * each.point.spec.tokens_per_step,
            "seconds": round(each.seconds, 1),
            "evaluation": None if each.evaluation is None else dict(each.evaluation),
        }
        for each in outcomes
    ]
    return {"grids": summary, "points": points}
