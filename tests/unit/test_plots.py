"""The pictures of a run: what is marked in them, and that nothing in a run's files breaks them."""

import math
import time
from itertools import pairwise
from pathlib import Path

import pytest
from dmuon_platform import cli
from dmuon_platform.events import Journal
from dmuon_platform.picture import use_decades
from dmuon_platform.plots import draw_plots
from dmuon_platform.spool import MetricsSpool
from matplotlib.figure import Figure
from matplotlib.image import imread

PLAN = {
    "bytes_per_owner": [2**20, 2**21],
    "cost_per_owner": [10, 12],
    "num_matrices_per_owner": [1, 2],
}


def train(folder: Path, first: int, last: int, loss: float = 0.0) -> None:
    spool = MetricsSpool(folder)
    for step in range(first, last + 1):
        metrics = {
            "train/loss": loss or 1 / step,
            "train/lr_muon": 0.02,
            "train/lr_adamw": 0.01,
            "speed/tokens_per_s": 1000.0,
        }
        spool.append(step, metrics, time.time())


def num_marks(picture: Path) -> int:
    """Vertical grey lines from the bottom of the axes to their top."""
    red, green, blue = imread(picture)[:, :, :3].transpose(2, 0, 1)
    is_grey = (abs(red - green) < 0.02) & (abs(red - blue) < 0.02) & (red > 0.3) & (red < 0.8)
    columns = [x for x, count in enumerate(is_grey.sum(axis=0)) if count > 150]
    return len(columns) and 1 + sum(after - before > 3 for before, after in pairwise(columns))


def test_every_start_but_the_first_is_marked(tmp_path):
    journal = Journal(tmp_path)
    for attempt, step in enumerate((0, 10, 30)):
        journal.append("training_started", attempt=attempt + 1, step=step, plan=PLAN)
        train(tmp_path, step + 1, 50)
        paths = draw_plots(tmp_path)
        names = ["loss.png", "throughput.png", "learning_rates.png", "ownership.png"]
        assert [path.name for path in paths] == names
        assert [num_marks(path) for path in paths] == [attempt, attempt, attempt, 0]
    assert {path.name for path in (tmp_path / "plots").iterdir()} == set(names)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e300])
def test_numbers_that_are_none_are_drawn_all_the_same(tmp_path, loss):
    train(tmp_path, 1, 5)
    train(tmp_path, 6, 7, loss)
    assert len(draw_plots(tmp_path)) == 3


def test_a_long_run_is_drawn_whole(tmp_path):
    train(tmp_path, 1, 9_000, loss=2.0)
    train(tmp_path, 9_001, 9_100, loss=1.0)
    short = tmp_path / "short"
    train(short, 1, 90, loss=2.0)
    train(short, 91, 91, loss=1.0)
    long, few = (imread(draw_plots(folder)[0]) for folder in (tmp_path, short))
    assert abs(long - few)[:, 200:].mean() < 0.02  # but for the numbers at the axis


def test_plot_draws_where_it_is_told_to(tmp_path, capsys):
    train(tmp_path / "run", 1, 5)
    Journal(tmp_path / "run").append("launched")
    arguments = ["plot", "run", "--storage", str(tmp_path), "--output", str(tmp_path / "here")]
    assert cli.main(arguments) == 0
    assert [Path(line).parent for line in capsys.readouterr().out.split()] == [
        tmp_path / "here"
    ] * 3
    (tmp_path / "a_file").touch()
    assert cli.main([*arguments[:-1], str(tmp_path / "a_file")]) == 1
    assert "--output" in capsys.readouterr().err


def test_numbers_along_decades_are_plain():
    figure = Figure()
    axes = figure.subplots()
    axes.plot([1, 2, 3], [0.55, 2.0, 8.0])
    use_decades(axes)
    figure.canvas.draw()
    labels = [each.get_text() for each in axes.get_yticklabels(which="both")]
    assert "0.6" in labels
    assert not [each for each in labels if "e" in each]
