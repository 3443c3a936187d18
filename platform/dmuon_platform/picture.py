"""How a picture of a run looks, on paper and in a page: matplotlib without a screen."""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, MaxNLocator

from dmuon_platform.run_history import Curve, RunHistory

WIDTH, HEIGHT, DPI = 7.2, 3.6, 150
"""Inches, and dots an inch."""

FEW_STARTS = 20
"""Up to which the best place for a legend is looked for, which takes long among many lines."""

BLUE, ORANGE, GREEN, PURPLE = "#2166ac", "#d6604d", "#2f8f5b", "#7b61b3"
SERIES = (BLUE, ORANGE, GREEN, PURPLE)
GREY, INK, GRID = "#666666", "#1c2128", "#dddddd"

_IN_A_PAGE = {  # where the reader may like it dark
    BLUE: "var(--blue)",
    ORANGE: "var(--orange)",
    GREEN: "var(--green)",
    PURPLE: "var(--purple)",
    GREY: "var(--grey)",
    GRID: "var(--grid)",
    INK: "currentColor",
}

_STYLE: Any = {
    "text.parse_math": False,  # a name may have a dollar sign
    "svg.fonttype": "none",  # text stays text: small, and found by a search
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titlesize": 11,
}

Draw = Callable[[Figure, RunHistory], None]


@dataclass(frozen=True)
class Picture:
    """One picture of a run.

    Attributes:
        name: Of its file.
        title: In words.
        about: What it shows and how it is read, in a sentence.
        draw: Draws it into a figure.
        has_band: Whether neighbours that go together show their range.
        is_thinned: Whether neighbours go together at all.
        keys: With which the names of its curves begin; without any of the first it is not drawn.
    """

    name: str
    title: str
    about: str
    draw: Draw
    keys: tuple[str, ...] = ()
    has_band: bool = True
    is_thinned: bool = True

    def write(self, run: RunHistory, path: Path) -> Path:
        """Write it as a PNG.

        Raises:
            OSError: It cannot be written.
        """
        with matplotlib.rc_context(_STYLE):
            figure = self._figure(run)
            figure.suptitle(f"{run.name}: {self.title.lower()}", fontsize=12)
            save(figure, path)
        return path

    def markup(self, run: RunHistory) -> str:
        """Return it as an ``<svg>`` element for a page, in the colours of the page."""
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": self.name}):
            figure = self._figure(run)
            FigureCanvasSVG(figure)
            nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            out = StringIO()
            figure.savefig(out, format="svg", transparent=True, metadata=nothing)
        return self._as_element(out.getvalue())

    def _figure(self, run: RunHistory) -> Figure:
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        self.draw(figure, run)
        return figure

    def _as_element(self, svg: str) -> str:
        """Make a part of a page of an XML file: no prologue or namespace, ids of its own."""
        svg = svg[svg.index("<svg") :]
        head, rest = svg.split(">", 1)
        box = re.search(r'viewBox="[^"]*"', head)
        rest = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", rest, flags=re.DOTALL)
        rest = re.sub(r"""(\sid="|xlink:href="#|url\(#)""", rf"\g<1>{self.name}-", rest)
        rest = rest.replace("xlink:href=", "href=")
        for color, value in _IN_A_PAGE.items():
            rest = rest.replace(color, value)
        label = f'role="img" aria-label="{self.title}"'
        return f"<svg {box[0] if box else ''} {label}>{rest.strip()}"


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG that is there as a whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    FigureCanvasAgg(figure)
    temporary = path.with_name(f".{path.name}")
    try:
        figure.savefig(temporary, format="png", dpi=DPI)
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def axes_of(figure: Figure, label: str) -> Axes:
    """Return axes over the steps of a run."""
    axes = figure.add_subplot()
    axes.set(xlabel="step", ylabel=label)
    return axes


def plot(axes: Axes, curve: Curve, label: str, color: str, **style: Any) -> None:
    """Draw a curve; of a long one the means of neighbours, in a band from least to greatest."""
    points = curve.thinned()
    axes.plot(points.steps, points.means, color=color, label=label, **{"linewidth": 1.2, **style})
    if points.size > 1:
        between = points.least, points.greatest
        axes.fill_between(points.steps, *between, color=color, alpha=0.2, linewidth=0)


def finish(axes: Axes, run: RunHistory) -> None:
    """Mark where the training began again, and tidy up."""
    for index, step in enumerate(run.starts):
        label = f"began again ({len(run.starts)} x)" if index == 0 else None
        axes.axvline(step, color=GREY, linewidth=1.0, linestyle="--", label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    tidy(axes)
    are_few = len(run.starts) <= FEW_STARTS
    axes.legend(frameon=False, fontsize=9, loc="best" if are_few else "upper right")


class _PlainLogFormatter(LogFormatter):
    """Labels the ticks that its base does, which writes those below 1 with an exponent."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def use_decades(axes: Axes) -> None:
    """Make the axis of values logarithmic, with plain numbers at it."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(_PlainLogFormatter(minor_thresholds=(1, 0.4)))


def tidy(axes: Axes) -> None:
    """Leave out what distracts."""
    axes.grid(visible=True, axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
