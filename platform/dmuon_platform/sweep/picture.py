"""The picture of a sweep: held-out bits a byte over what was varied, a line a grid."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dmuon_platform.picture import BLUE, DPI, GREY, HEIGHT, ORANGE, WIDTH, save
from dmuon_platform.sweep.grid import Grid, last_part
from dmuon_platform.sweep.outcome import Row

COLORS = (BLUE, ORANGE, "#1b7837", "#762a83", GREY)


def draw_sweep(title: str, rows: Sequence[Row], grids: Sequence[Grid], path: Path) -> bool:
    """Draw the means over seeds with bars from the lowest to the highest of them.

    Returns:
        Whether there was anything to draw: a grid with numbers along one axis.
    """
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    lines = [line for number, grid in enumerate(grids) for line in _lines(rows, number, grid)]
    for (label, points), color in zip(lines, cycle(COLORS), strict=False):
        _draw_line(axes, label, points, color)
    if not lines:
        return False
    keys = {_along(grid) for grid in grids} - {None}
    axes.set(title=title, xlabel=" or ".join(sorted(map(str, keys))), ylabel="held-out bits a byte")
    axes.set_xscale("log")
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save(figure, path)
    return True


def _draw_line(axes: Axes, label: str, points: list[tuple[float, Row]], color: str) -> None:
    x = [number for number, _ in points]
    middle = [row.middle for _, row in points]
    below = [row.middle - min(row.values) for _, row in points]
    above = [max(row.values) - row.middle for _, row in points]
    axes.errorbar(
        x,
        middle,
        yerr=[below, above],
        label=label,
        color=color,
        marker="o",
        markersize=5,
        capsize=3,
    )


def _lines(
    rows: Sequence[Row], number: int, grid: Grid
) -> Iterator[tuple[str, list[tuple[float, Row]]]]:
    """Yield a line for each combination of what is varied beside the axis of the picture."""
    along = _along(grid)
    if along is None:
        return
    others = [key for key in grid.varied if key != along]
    lines: dict[str, list[tuple[float, Row]]] = {}
    for row in rows:
        if row.grid == number and row.values and not row.num_diverged:
            beside = [f"{last_part(key)} {row.settings[key]}" for key in others]
            label = ", ".join([grid.label, *beside])
            lines.setdefault(label, []).append((float(row.settings[along]), row))
    yield from (
        (label, sorted(points, key=lambda each: each[0])) for label, points in lines.items()
    )


def _along(grid: Grid) -> str | None:
    """The key with most values, all of them positive numbers."""
    for key in sorted(grid.varied, key=lambda key: -len(grid.axes[key])):
        with suppress(ValueError):
            if all(float(value) > 0 for value in grid.axes[key]):
                return key
    return None
