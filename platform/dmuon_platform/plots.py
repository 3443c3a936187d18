"""Pictures of a run: how it learns, how fast, where its time goes, and whether Muon is healthy.

Drawn from the run's files, outside the training.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from dmuon_platform.health import HALF_THE_DIRECTIONS
from dmuon_platform.metric_names import (
    CHANGE,
    ERROR_MAX,
    ERROR_MEAN,
    EVALUATION_LOSS,
    GRADIENT_NORM,
    LEARNING_RATE,
    NORM_MAX,
    NORM_MIN,
    TIME,
    TOKENS_PER_S,
    TRAIN_LOSS,
)
from dmuon_platform.picture import (
    BLUE,
    GREY,
    ORANGE,
    SERIES,
    Picture,
    axes_of,
    finish,
    plot,
    tidy,
    use_decades,
)
from dmuon_platform.run_folder import PLOTS_FOLDER
from dmuon_platform.run_history import PER_OWNER, STEP_S, RunHistory, read_history
from dmuon_platform.wall_time import wall_time

MIB = 2**20

MOST_BARS = 128


def draw_plots(run_dir: Path, folder: Path | None = None) -> list[Path]:
    """Draw every picture that there is something for; return their files.

    Args:
        run_dir: The folder of the run.
        folder: Where to; by default ``plots`` in it.

    Raises:
        OSError: They cannot be written.
    """
    run = read_history(run_dir)
    folder = run_dir / PLOTS_FOLDER if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    return [each.write(run, folder / f"{each.name}.png") for each in pictures_of(run)]


def pictures_of(run: RunHistory) -> Iterator[Picture]:
    """Yield the pictures that there is something for."""
    yield from (picture for picture in PICTURES if _has(run, picture))


def _has(run: RunHistory, picture: Picture) -> bool:
    if picture is OWNERSHIP:
        return all(run.plan.get(key) for key in PER_OWNER)
    return bool(run.keys(picture.keys[0]))


def _draw_loss(figure: Figure, run: RunHistory) -> None:
    axes = axes_of(figure, "loss, nats a token")
    plot(axes, run.curves[TRAIN_LOSS], "training", BLUE)
    if run.is_known(EVALUATION_LOSS):
        style: Any = {"marker": "o", "markersize": 4.0}
        plot(axes, run.curves[EVALUATION_LOSS], "held-out", ORANGE, **style)
    finish(axes, run)


def _draw_throughput(figure: Figure, run: RunHistory) -> None:
    axes = axes_of(figure, "tokens a second")
    curve = run.curves[TOKENS_PER_S]
    plot(axes, curve, "each step", BLUE, linewidth=0.8)
    middle = median(curve.values)
    axes.axhline(middle, color=ORANGE, linewidth=1.2, label=f"median {middle:,.0f}")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    finish(axes, run)


def _draw_learning_rates(figure: Figure, run: RunHistory) -> None:
    axes = axes_of(figure, "learning rate")
    keys = sorted(run.keys(LEARNING_RATE), reverse=True)
    for key, color in zip(keys, SERIES, strict=False):
        plot(axes, run.curves[key], key.removeprefix(LEARNING_RATE), color, linewidth=1.5)
    axes.set_ylim(bottom=0)
    finish(axes, run)


def _draw_gradient(figure: Figure, run: RunHistory) -> None:
    axes = axes_of(figure, "norm of the whole gradient")
    plot(axes, run.curves[GRADIENT_NORM], "before clipping", BLUE, linewidth=0.9)
    use_decades(axes)
    finish(axes, run)


def _draw_step_time(figure: Figure, run: RunHistory) -> None:
    axes = axes_of(figure, "seconds a step")
    steps, floor = None, None
    for key, color in zip(run.keys(TIME), SERIES, strict=False):
        points = run.curves[key].thinned()
        if steps is None or floor is None or len(steps) != len(points.steps):
            steps, floor = points.steps, [0.0] * len(points.steps)
        top = [low + mean for low, mean in zip(floor, points.means, strict=True)]
        label = key.removeprefix(TIME).removesuffix("_s").replace("_", " and ")
        axes.fill_between(steps, floor, top, color=color, alpha=0.8, linewidth=0, label=label)
        floor = top
    if run.is_known(STEP_S):
        points = run.curves[STEP_S].thinned()
        axes.plot(points.steps, points.means, color=GREY, linewidth=0.8, label="whole step")
    axes.set_ylim(bottom=0)
    finish(axes, run)


def _draw_goodput(figure: Figure, run: RunHistory) -> None:
    axes = figure.add_subplot()
    left = 0.0
    for (label, seconds), color in zip(wall_time(run).parts().items(), SERIES, strict=True):
        label = f"{label}: {seconds:,.1f} s"
        axes.barh([0], [seconds], left=left, color=color, height=0.5, label=label)
        left += seconds
    axes.set(xlabel="seconds of wall time", yticks=[], ylim=(-0.5, 0.5), xlim=(0, left or 1))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    tidy(axes)
    axes.spines["left"].set_visible(False)
    figure.legend(frameon=False, fontsize=9, loc="outside upper left", ncols=2)


def _draw_ownership(figure: Figure, run: RunHistory) -> None:
    sizes = [size / MIB for size in run.plan["bytes_per_owner"]]
    costs = run.plan["cost_per_owner"]
    mean = sum(costs) / len(costs) or 1
    bars = {
        "weights and momentum, MiB": (sizes, sum(sizes) / len(sizes)),
        "Newton-Schulz work, 1 is the mean": ([cost / mean for cost in costs], 1.0),
    }
    left, right = figure.subplots(1, 2)
    for axes, (label, (values, level)) in zip((left, right), bars.items(), strict=True):
        if len(values) <= MOST_BARS:
            axes.bar(range(len(values)), values, color=BLUE, width=0.8)
        else:  # thousands of rectangles would take long to draw, and to show
            edges = [place - 0.5 for place in range(len(values) + 1)]
            axes.stairs(values, edges, fill=True, color=BLUE)
        axes.axhline(level, color=ORANGE, linewidth=1.2, label="mean")
        axes.set(xlabel="owner rank", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        tidy(axes)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=9, loc="outside lower center")


_MARKED: Any = {"marker": "o", "markersize": 3.0}
"""Of curves that are measured once in many steps."""


def _draw_spectral_norm(figure: Figure, run: RunHistory) -> None:
    axes = axes_of(figure, "largest singular value")
    plot(axes, run.curves[NORM_MAX], "highest of all matrices", BLUE, **_MARKED)
    plot(axes, run.curves[NORM_MIN], "lowest of all matrices", ORANGE, **_MARKED)
    if run.updates is not None:
        low, high = run.updates[1].band
        axes.axhspan(low, high, color=GREY, alpha=0.15, linewidth=0, label="whole updates")
        axes.set_ylim(top=max(1.2 * high, axes.get_ylim()[1]))
    axes.set_ylim(bottom=0)
    finish(axes, run)


def _draw_orthogonality(figure: Figure, run: RunHistory) -> None:
    axes = axes_of(figure, "orthogonality error")
    plot(axes, run.curves[ERROR_MAX], "highest of all matrices", ORANGE, **_MARKED)
    plot(axes, run.curves[ERROR_MEAN], "mean", BLUE, **_MARKED)
    label = "half of the directions"
    axes.axhline(HALF_THE_DIRECTIONS, color=GREY, linewidth=1.0, linestyle=":", label=label)
    axes.set_ylim(bottom=0)
    finish(axes, run)


def _draw_update_size(figure: Figure, run: RunHistory) -> None:
    axes = axes_of(figure, "RMS of update over RMS of weight")
    plot(axes, run.curves[CHANGE], "median of all matrices", BLUE, **_MARKED)
    use_decades(axes)
    finish(axes, run)


LOSS = Picture(
    "loss",
    "Loss",
    "Mean cross-entropy of a step's global batch, and of the held-out sequences.",
    _draw_loss,
    (TRAIN_LOSS, EVALUATION_LOSS),
)
THROUGHPUT = Picture(
    "throughput",
    "Throughput",
    "Tokens of a step over its seconds; evaluation and saving are not in it.",
    _draw_throughput,
    (TOKENS_PER_S,),
)
LEARNING_RATES = Picture(
    "learning_rates",
    "Learning rates",
    "Of Muon, before the factor for a matrix's shape, and of AdamW.",
    _draw_learning_rates,
    (LEARNING_RATE,),
)
GRADIENT = Picture(
    "gradient_norm",
    "Gradient norm",
    "Over all parameters, before clipping; a logarithmic axis.",
    _draw_gradient,
    (GRADIENT_NORM,),
)
STEP_TIME = Picture(
    "step_time",
    "Where a step's time goes",
    "Rank 0's spans on top of each other; above them, what lies between.",
    _draw_step_time,
    (TIME,),
    has_band=False,
)
GOODPUT = Picture(
    "goodput",
    "Where the wall time went",
    "Of all launches together; goodput is the part in steps that count. Evaluation, saving, and "
    "steps that were lost or done twice are in the rest.",
    _draw_goodput,
    (STEP_S,),
    is_thinned=False,
)
OWNERSHIP = Picture(
    "ownership",
    "Balance of owners",
    "What each owner keeps and computes, in the newest attempt.",
    _draw_ownership,
)
SPECTRAL_NORM = Picture(
    "spectral_norm",
    "Spectral norm of updates",
    "Of the orthogonalised updates, before the learning rate. The grey band is what Newton-Schulz "
    "makes of every direction that the gradient has.",
    _draw_spectral_norm,
    (NORM_MAX, NORM_MIN),
)
ORTHOGONALITY = Picture(
    "orthogonality",
    "Orthogonality error of updates",
    "Root mean square of sigma^2 - 1 over a matrix's singular values: 0 is orthogonal, 1 is no "
    "update at all. At the dotted line half of the directions are missing.",
    _draw_orthogonality,
    (ERROR_MAX, ERROR_MEAN),
)
UPDATE_SIZE = Picture(
    "update_size",
    "Size of updates",
    "How much of itself a matrix changes by in a step; a logarithmic axis.",
    _draw_update_size,
    (CHANGE,),
)
PICTURES = (
    LOSS,
    THROUGHPUT,
    LEARNING_RATES,
    GRADIENT,
    STEP_TIME,
    GOODPUT,
    OWNERSHIP,
    SPECTRAL_NORM,
    ORTHOGONALITY,
    UPDATE_SIZE,
)
