"""Pictures of a run: loss, throughput, learning rates, and how even the owners' work is.

Drawn from the run's files, outside the training; with matplotlib's Agg, which needs no screen.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from dmuon_platform.events import Journal
from dmuon_platform.spool import MetricsSpool, Record

PLOTS_FOLDER = "plots"

TRAIN_LOSS = "train/loss"
EVALUATION_LOSS = "evaluation/loss"
TOKENS_PER_S = "speed/tokens_per_s"
LEARNING_RATE = "train/lr_"

RECORDS_AT_ONCE = 1000
MOST_POINTS = 2000
"""Of a curve, wider than the picture; longer ones are shown by means of neighbours."""

WIDTH, HEIGHT, DPI = 9.0, 4.5, 120
"""Inches, and dots an inch."""

BLUE, ORANGE, GREY = "#2166ac", "#d6604d", "#666666"
MIB = 2**20

Draw = Callable[[Figure, "_Run"], None]


@dataclass
class _Curve:
    steps: "array[float]" = field(default_factory=lambda: array("d"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def thinned(self) -> tuple[list[float], list[float]]:
        """Return at most `MOST_POINTS` points, each the mean of its neighbours."""
        size = -(-len(self.steps) // MOST_POINTS) or 1
        return _means(self.steps, size), _means(self.values, size)


@dataclass(frozen=True)
class _Run:
    """What is drawn of a run."""

    name: str
    curves: Mapping[str, _Curve]
    starts: Sequence[float]
    """Steps at which it was started again."""
    plan: Mapping[str, Any]


def draw_plots(run_dir: Path, folder: Path | None = None) -> list[Path]:
    """Draw every picture that there is something for; return their files.

    Args:
        run_dir: The folder of the run.
        folder: Where to; by default ``plots`` in it.

    Raises:
        OSError: They cannot be written.
    """
    run = _read(run_dir)
    folder = run_dir / PLOTS_FOLDER if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw(run, draw, folder / f"{name}.png") for name, draw in _worth_drawing(run)]


def _worth_drawing(run: _Run) -> Iterator[tuple[str, Draw]]:
    if TRAIN_LOSS in run.curves:
        yield "loss", _draw_loss
    if TOKENS_PER_S in run.curves:
        yield "throughput", _draw_throughput
    if any(key.startswith(LEARNING_RATE) for key in run.curves):
        yield "learning_rates", _draw_learning_rates
    if run.plan.get("bytes_per_owner") and run.plan.get("cost_per_owner"):
        yield "ownership", _draw_ownership


def _read(run_dir: Path) -> _Run:
    curves: dict[str, _Curve] = {}
    for record in _records(MetricsSpool(run_dir)):
        for key, value in record.metrics.items():
            if key.startswith((TRAIN_LOSS, EVALUATION_LOSS, TOKENS_PER_S, LEARNING_RATE)):
                curve = curves.setdefault(key, _Curve())
                curve.steps.append(record.step)
                curve.values.append(value)
    started = [e for e in Journal(run_dir).read() if e.get("kind") == "training_started"]
    plans = [event["plan"] for event in started if isinstance(event.get("plan"), dict)]
    starts = [event["step"] for event in started[1:] if isinstance(event.get("step"), int)]
    return _Run(run_dir.name, curves, starts, plans[-1] if plans else {})


def _records(spool: MetricsSpool) -> Iterator[Record]:
    """Yield all records without ever holding all of them."""
    records, offset = spool.read_from(0, RECORDS_AT_ONCE)
    while records:
        yield from records
        records, offset = spool.read_from(offset, RECORDS_AT_ONCE)


def _draw(run: _Run, draw: Draw, path: Path) -> Path:
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure, run)
    temporary = path.with_name(f".{path.name}")
    try:
        figure.savefig(temporary, format="png")
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()
    return path


def _draw_loss(figure: Figure, run: _Run) -> None:
    axes = _axes(figure, run, "loss", "nats a token")
    axes.plot(*run.curves[TRAIN_LOSS].thinned(), color=BLUE, linewidth=1.2, label="training")
    if EVALUATION_LOSS in run.curves:
        held_out = run.curves[EVALUATION_LOSS].thinned()
        axes.plot(
            *held_out, color=ORANGE, linewidth=1.2, marker="o", markersize=4, label="held-out"
        )
    _finish(axes, run)


def _draw_throughput(figure: Figure, run: _Run) -> None:
    axes = _axes(figure, run, "throughput", "tokens a second")
    curve = run.curves[TOKENS_PER_S]
    axes.plot(*curve.thinned(), color=BLUE, linewidth=0.8, alpha=0.7, label="each step")
    middle = median(curve.values)
    axes.axhline(middle, color=ORANGE, linewidth=1.2, label=f"median {middle:,.0f}")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    _finish(axes, run)


def _draw_learning_rates(figure: Figure, run: _Run) -> None:
    axes = _axes(figure, run, "learning rates", "learning rate")
    keys = sorted((key for key in run.curves if key.startswith(LEARNING_RATE)), reverse=True)
    for key, color in zip(keys, (BLUE, ORANGE, GREY), strict=False):
        label = key.removeprefix(LEARNING_RATE)
        axes.plot(*run.curves[key].thinned(), color=color, linewidth=1.5, label=label)
    axes.set_ylim(bottom=0)
    _finish(axes, run)


def _draw_ownership(figure: Figure, run: _Run) -> None:
    figure.suptitle(f"{run.name}: what each owner has and does")
    sizes = [size / MIB for size in run.plan["bytes_per_owner"]]
    costs = run.plan["cost_per_owner"]
    mean = sum(costs) / len(costs) or 1
    bars = {
        "weights and momentum, MiB": (sizes, sum(sizes) / len(sizes)),
        "Newton-Schulz work, 1 is the mean": ([cost / mean for cost in costs], 1.0),
    }
    left, right = figure.subplots(1, 2)
    for axes, (label, (values, level)) in zip((left, right), bars.items(), strict=True):
        axes.bar(range(len(values)), values, color=BLUE, width=0.8)
        axes.axhline(level, color=ORANGE, linewidth=1.2, label="mean")
        axes.set(xlabel="owner rank", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        _tidy(axes)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center")


def _axes(figure: Figure, run: _Run, what: str, label: str) -> Axes:
    axes = figure.add_subplot()
    axes.set(title=f"{run.name}: {what}", xlabel="step", ylabel=label)
    return axes


def _finish(axes: Axes, run: _Run) -> None:
    for index, step in enumerate(run.starts):
        label = f"started again ({len(run.starts)} x)" if index == 0 else None
        axes.axvline(step, color=GREY, linewidth=1.0, linestyle="--", label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    _tidy(axes)
    axes.legend(frameon=False)


def _tidy(axes: Axes) -> None:
    axes.grid(visible=True, axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _means(values: Sequence[float], size: int) -> list[float]:
    parts = [values[start : start + size] for start in range(0, len(values), size)]
    return [sum(part) / len(part) for part in parts]
