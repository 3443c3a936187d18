"""What pictures and reports are drawn from: curves over restarts, and where the wall time went."""

import time
from pathlib import Path

import pytest
from dmuon_platform.line_file import LineFile
from dmuon_platform.run_history import MOST_POINTS, Curve, read_history
from dmuon_platform.spool import MetricsSpool
from dmuon_platform.wall_time import wall_time


def journal(folder: Path, *events: tuple[float, str, dict]) -> None:
    for when, kind, facts in events:
        LineFile(folder / "events.jsonl").append({"kind": kind, "time": when, **facts})


def train(folder: Path, steps: range, begin: float, loss: float = 1.0) -> None:
    """Steps of two seconds, a line after each."""
    spool = MetricsSpool(folder)
    for number, step in enumerate(steps, start=1):
        metrics = {"train/loss": loss, "train/tokens": 100.0 * step, "speed/tokens_per_s": 50.0}
        spool.append(step, metrics, begin + 2 * number)


def test_wall_time_is_that_of_launches_and_goodput_that_of_steps_that_count(tmp_path) -> None:
    train(tmp_path, range(1, 11), 110.0)
    train(tmp_path, range(6, 16), 160.0)  # five of them again, which take time and count once
    journal(
        tmp_path,
        (100.0, "launched", {}),
        (110.0, "training_started", {"step": 0}),
        (120.0, "checkpoint_saved", {"step": 5}),
        # killed after step 10, at 130
        (150.0, "launched", {}),
        (160.0, "training_started", {"step": 5}),
        (170.0, "update_dropped", {"step": 12}),
        (180.0, "restarted", {"step": 15}),
        (184.0, "training_started", {"step": 15}),
        (185.0, "trained", {"step": 15}),
        (190.0, "ended", {"exit_code": 0}),
    )
    times = wall_time(read_history(tmp_path))
    assert times.total == (130 - 100) + (190 - 150)
    assert times.between == 150 - 130
    assert times.steps == 2 * (15 - 1)
    assert times.starting == 10 + 10 + 4
    assert times.closing == 5
    assert times.other == 70 - 28 - 24 - 5
    assert times.goodput == pytest.approx(28 / 70)
    assert sum(times.parts().values()) == times.total


def test_a_run_that_goes_on_is_reckoned_until_now_and_one_without_steps_has_no_goodput(
    tmp_path,
) -> None:
    assert wall_time(read_history(tmp_path)).goodput is None
    journal(tmp_path, (100.0, "launched", {}), (110.0, "training_started", {"step": 0}))
    train(tmp_path, range(1, 6), 110.0)
    assert wall_time(read_history(tmp_path)).total == 20
    assert wall_time(read_history(tmp_path, now=140.0)).goodput == pytest.approx(10 / 40)


def test_what_a_roll_back_undid_is_in_no_curve(tmp_path) -> None:
    train(tmp_path, range(1, 11), 0.0, loss=1.0)
    spool = MetricsSpool(tmp_path)
    spool.forget(5)
    for step in range(6, 9):
        spool.append(step, {"train/loss": 2.0}, time.time())
    curve = read_history(tmp_path).curves["train/loss"]
    assert list(curve.steps) == list(range(1, 9))
    assert list(curve.values) == [1.0] * 5 + [2.0] * 3


def test_a_long_curve_keeps_its_mean_and_its_extremes() -> None:
    curve = Curve()
    for step in range(3 * MOST_POINTS):
        curve.put(step, 50.0 if step == 1000 else float(step % 3))
    points = curve.thinned()
    assert (points.size, len(points.steps)) == (3, MOST_POINTS)
    assert points.means[0] == 1.0
    assert (min(points.least), max(points.greatest)) == (0.0, 50.0)
    curve.put(7, -1.0)  # again, or late: in its place
    assert curve.at(7) == -1.0
    assert len(curve.steps) == 3 * MOST_POINTS
