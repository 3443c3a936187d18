"""The benchmark command: what it counts, that both contenders train, how it fails. No times."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dmuon.bench import bound, command
from dmuon.bench.clock import Laps
from dmuon.bench.measure import ModelFacts, RankReport
from dmuon.bench.ranks import Launch, RankError, run_ranks
from dmuon.bench.settings import Settings
from dmuon.bench.summary import (
    PHASES,
    loss_difference,
    optimizer_per_products,
    parity,
    spread,
)
from dmuon.newton_schulz import newton_schulz_flops

ROOT = Path(__file__).parents[2]
WIDTH, INTERMEDIATE, LAYERS, STEPS, REPEATS, WARMUP = 32, 48, 2, 2, 2, 1
TINY = {
    "ranks": "1,2",
    "steps": STEPS,
    "repeats": REPEATS,
    "warmup": WARMUP,
    "width": WIDTH,
    "intermediate": INTERMEDIATE,
    "layers": LAYERS,
    "heads": 2,
    "sequence": 16,
    "batch": 4,
}
MATRICES = 7 * LAYERS
DEDICATED = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * INTERMEDIATE)


def run_command(file: Path, *more: str) -> tuple[str, dict[str, Any]]:
    options = [str(part) for name, value in TINY.items() for part in (f"--{name}", value)]
    call = [sys.executable, "-m", "dmuon.bench", *options, "--device", "cpu", "--json", str(file)]
    done = subprocess.run(
        [*call, *more], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


@pytest.mark.parametrize(
    ("more", "passes", "item_bytes"),
    [
        ((), 2, 4),
        (("--no-reshard",), 1, 4),
        (("--precision", "bfloat16"), 2, 2),
    ],
    ids=["reshard", "keep", "bfloat16"],
)
def test_both_train_and_the_counted_bytes_are_the_floor(
    tmp_path: Path, more: tuple[str, ...], passes: int, item_bytes: int
) -> None:
    table, result = run_command(tmp_path / "bench.json", *more)

    assert result["model"]["dedicated"] == DEDICATED
    assert result["model"]["matrices"] == MATRICES
    assert [run["ranks"] for run in result["runs"]] == [1, 2]
    alone, both = result["runs"]
    assert alone["wire_bytes"] == {}
    gradients = (DEDICATED + MATRICES) * 4  # float32, and a flag for each
    assert both["wire_bytes"] == {
        "broadcast": passes * DEDICATED * item_bytes,
        "all_to_all": gradients,
        "agreement": 2 * 9 * 8,  # at forward and backward nine numbers, to compare the calls
    }
    assert both["broadcast_floor_bytes"] == passes * DEDICATED * item_bytes
    for run in result["runs"]:
        check_run(run)
    rounding = 1e-4 if item_bytes == 4 else 5e-2
    assert result["loss_difference_between_ranks"] < rounding
    assert "ratios" in table
    assert table.count("same start, finite, falling") == 2
    assert table.count("times as long as its matrix products alone") == 2
    assert "memory" not in table


def check_run(run: dict[str, Any]) -> None:
    assert run["newton_schulz_per_step"] == MATRICES
    assert run["optimizer_per_products"] > 0
    assert run["peak_bytes"] == {"adamw": None, "dmuon": None}  # nobody counts on a CPU
    assert run["parity"] == {"same_start": True, "finite": True, "falling": True}
    assert len(run["step_ratio"]["rounds"]) == REPEATS
    ratio = run["step_ratio"]
    assert 0 < ratio["min"] <= ratio["quartiles"][0] <= ratio["median"]
    assert ratio["median"] <= ratio["quartiles"][1] <= ratio["max"]
    for name in ("adamw", "dmuon"):
        losses = run["losses"][name]
        assert len(losses) == WARMUP + REPEATS * STEPS
        assert all(math.isfinite(loss) for loss in losses)
        assert set(run["phases"][name]) == set(PHASES)
        assert [len(block) for block in run["step_seconds"][name]] == [STEPS] * REPEATS


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", "1,two"], "whole numbers"),
        (["--ranks", "0"], "at least 1"),
        (["--ranks", "2,2"], "twice"),
        (["--ranks", "3"], "multiple of each of 3"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--timeout", "0"], "--timeout must be at least 1"),
        (["--width", "100"], "--width 100 must be a multiple"),
        (["--layers", "many"], "invalid int value"),
        (["--device", "cuda", "--ranks", "4096", "--batch", "4096"], "one GPU a rank"),
        (["--json", "no/such/folder/bench.json"], "a folder that exists"),
        (["--colour", "red"], "unrecognized arguments: --colour red"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_are_one_line_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == command.BAD_ARGUMENTS
    message = capsys.readouterr().err
    assert says in message
    assert message.count("\n") == 1


def test_the_error_of_a_rank_comes_to_the_caller() -> None:
    launch = Launch(num_ranks=2, device_type="cpu", num_threads=1, timeout_s=30)
    fails_on_rank_1 = ["of rank 0"].__getitem__
    with pytest.raises(RankError, match=r"(?s)rank 1 failed first:.*IndexError"):
        run_ranks(launch, fails_on_rank_1)


def test_a_rank_that_dies_silently_is_named_and_nobody_waits_for_it() -> None:
    launch = Launch(num_ranks=2, device_type="cpu", num_threads=1, timeout_s=30)
    with pytest.raises(RankError, match="died without a traceback"):
        run_ranks(launch, os._exit)


def test_the_spread_of_one_round_is_that_round() -> None:
    assert spread([1.5]) == {"median": 1.5, "quartiles": [1.5, 1.5], "min": 1.5, "max": 1.5}


def test_a_machine_of_one_operation_a_second_takes_as_many_seconds_as_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(size: int, product: tuple[int, int, int], *_: object) -> float:
        return 2.0 * size * math.prod(product)

    monkeypatch.setattr(bound, "_batch_seconds", seconds)
    shapes = [(24, 24), (24, 24), (24, 50), (128, 640), (640, 128)]  # batches, both forms
    operations = sum(newton_schulz_flops(*shape) for shape in shapes)
    assert bound.product_seconds(shapes, torch.device("cpu")) == operations


def test_the_optimizer_is_compared_with_the_products_of_the_rank_that_has_most() -> None:
    def report(product_seconds: float, *optimizer: float) -> RankReport:
        rounds = [{"dmuon": [Laps(9.0, 9.0, seconds)]} for seconds in optimizer]
        return RankReport(rounds, {}, {}, 0, product_seconds, {}, ModelFacts(0, 0, 0, 0, 0.0))

    reports = [report(0.0, 7.0, 7.0, 7.0), report(2.0, 3.0, 2.5, 50.0)]
    assert optimizer_per_products(reports) == 1.5


def test_parity_tells_what_does_not_hold() -> None:
    losses = {"adamw": [5.5, 5.0], "dmuon": [5.5, math.nan]}
    assert parity(losses) == {"same_start": True, "finite": False, "falling": False}


def test_the_largest_difference_of_a_loss_shows_nan() -> None:
    def run(*losses: float) -> dict[str, dict[str, list[float]]]:
        return {"losses": {"dmuon": list(losses)}}

    assert loss_difference([run(5.0, 4.0), run(5.0, 4.5)]) == 0.5
    assert math.isnan(loss_difference([run(5.0, 4.0), run(math.nan, 4.5)]))


def test_defaults_are_valid_and_about_ten_million_parameters() -> None:
    settings = Settings()
    weights = 4 * settings.width**2 + 3 * settings.width * settings.intermediate
    assert 9e6 < settings.layers * weights < 12e6
