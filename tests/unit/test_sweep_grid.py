"""What a sweep runs and how it is judged, without training."""

from pathlib import Path

import pytest
from dmuon_platform.errors import SpecError
from dmuon_platform.sweep.grid import Grid, Point, make_points
from dmuon_platform.sweep.outcome import Row, best_of, edges_of, table

ROOT = Path(__file__).parents[2]
JOB = ROOT / "jobs" / "tiny_cpu.toml"


def points(*grids: list[str], seeds: tuple[int, ...] = (0,)) -> list[Point]:
    return make_points(JOB, [], [Grid.parse(each) for each in grids], seeds, Path("/sweep"))


def test_every_combination_is_a_job_of_one_process_with_each_seed() -> None:
    made = points(
        ["optimizer.lr=0.01,0.02", "optimizer.adamw_betas=[0.9,0.95],[0.8,0.9]"],
        ["optimizer.algorithm=adamw"],
        seeds=(3, 5),
    )
    assert len(made) == len({point.spec.name for point in made}) == 2 * (2 * 2 + 1)
    assert [point.seed for point in made] == [3] * 5 + [5] * 5
    assert {point.spec.train.seed for point in made} == {3, 5}
    assert made[1].spec.optimizer.adamw_betas == (0.8, 0.9)
    assert made[4].spec.optimizer.algorithm == "adamw"
    assert all(point.spec.resources.workers == 1 for point in made)
    assert {point.spec.run_dir.parent for point in made} == {Path("/sweep")}


@pytest.mark.parametrize(
    ("grids", "what"),
    [
        ([["optimizer.lr"]], "optimizer.lr: must be section.key=VALUE,VALUE"),
        ([["optimizer.lr=0.1,,0.2"]], "must be section.key=VALUE,VALUE"),
        ([["optimizer.lr=0.1,0.1"]], "there twice"),
        ([["train.seed=1,2"]], "--seeds"),
        ([["train={seed=1}"]], "train.seed is the sweep's"),
        ([["resources.workers=1,2"]], "resources.workers is the sweep's"),
        ([["faults.inject.step=1"]], "faults.inject is the sweep's"),
        ([["optimizer.lr=fast"]], "optimizer.lr"),
        ([["optimizer.learning=0.1"]], "optimizer.learning"),
        ([["optimizer.lr=0.1,0.2"], ["optimizer.lr=0.2"]], "twice"),
        ([["optimizer.lr=0.02,0.020"]], "optimizer.lr=0.020 twice: optimizer.lr=0.02 trains the"),
    ],
)
def test_a_wrong_grid_is_refused_before_anything_is_trained(
    grids: list[list[str]], what: str
) -> None:
    with pytest.raises(SpecError, match=what):
        points(*grids)


def test_the_best_is_the_lowest_mean_of_settings_that_no_seed_made_diverge() -> None:
    grid = Grid.parse(["optimizer.lr=0.1,0.2,0.3"])
    rows = [
        Row(0, {"optimizer.lr": "0.1"}, (2.0, 2.2), 0),
        Row(0, {"optimizer.lr": "0.2"}, (1.9, 2.1), 0),
        Row(0, {"optimizer.lr": "0.3"}, (1.0,), 1),
    ]
    best = best_of(rows, 0)
    assert best is rows[1]
    assert edges_of(best, grid) == []
    starred = [line for line in table(rows, [grid]).splitlines() if line.endswith("*")]
    assert [line.split() for line in starred] == [
        ["lr", "0.2", "2.0000", "1.9000", "2.1000", "2", "*"]
    ]
    assert "1 of 2" in table(rows, [grid])


def test_a_best_value_at_the_end_of_its_axis_is_told() -> None:
    grid = Grid.parse(["optimizer.lr=0.2,0.1", "optimizer.nesterov=true,false"])
    best = Row(0, {"optimizer.lr": "0.1", "optimizer.nesterov": "true"}, (1.0,), 0)
    assert edges_of(best, grid) == ["optimizer.lr"]


def test_where_all_diverge_there_is_no_best() -> None:
    assert best_of([Row(0, {"optimizer.lr": "9"}, (), 1)], 0) is None
