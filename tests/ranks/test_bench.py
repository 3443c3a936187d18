"""The benchmark command: what it counts, that all contenders agree, how it fails. No times."""

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dmuon.bench import bound, command, decoder
from dmuon.bench.clock import Laps
from dmuon.bench.host_footprint import HostFootprint
from dmuon.bench.measure import ModelFacts, RankReport
from dmuon.bench.presets import PRESETS
from dmuon.bench.ranks import Launch, RankError, run_ranks
from dmuon.bench.settings import Settings
from dmuon.bench.summary import (
    PHASES,
    best_other,
    loss_difference,
    optimizer_per_products,
    parity,
    spread,
)
from dmuon.bench.track import Turn
from dmuon.newton_schulz import newton_schulz_flops

ROOT = Path(__file__).parents[2]
WIDTH, INTERMEDIATE, LAYERS, STEPS, REPEATS, WARMUP = 32, 48, 2, 2, 2, 1
RANKS = 3  # over which rows do not divide evenly
TINY = {
    "ranks": f"1,{RANKS}",
    "steps": STEPS,
    "repeats": REPEATS,
    "warmup": WARMUP,
    "width": WIDTH,
    "intermediate": INTERMEDIATE,
    "layers": LAYERS,
    "heads": 2,
    "sequence": 16,
    "batch": 2 * RANKS,
}


def run_command(file: Path, *more: str) -> tuple[str, dict[str, Any]]:
    options = [str(part) for name, value in TINY.items() for part in (f"--{name}", value)]
    call = [sys.executable, "-m", "dmuon.bench", *options, "--device", "cpu", "--json", str(file)]
    done = subprocess.run(
        [*call, *more], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


@pytest.mark.parametrize(
    ("others", "more", "layer_passes", "item_bytes"),
    [
        (("gather", "alltoall", "alone"), (), 2 * LAYERS - 1, 4),
        ((), ("--no-reshard", "--no-gated", "--vocabulary", "300"), LAYERS, 4),
        (("alltoall",), ("--precision", "bfloat16", "--ns-dtype", "bfloat16"), 2 * LAYERS - 1, 2),
    ],
    ids=["reshard", "keep", "bfloat16"],
)
def test_all_train_alike_and_the_counted_bytes_are_the_floor(
    tmp_path: Path,
    others: tuple[str, ...],
    more: tuple[str, ...],
    layer_passes: int,
    item_bytes: int,
) -> None:
    contenders = ("adamw", "dmuon", *others)
    call = (*more, "--contenders", ",".join(contenders))
    table, result = run_command(tmp_path / "bench.json", *call)

    matrices = 6 * LAYERS if "--no-gated" in more else 7 * LAYERS
    dedicated = LAYERS * WIDTH * (4 * WIDTH + (matrices // LAYERS - 4) * INTERMEDIATE)
    assert result["model"]["dedicated"] == dedicated
    assert result["model"]["matrices"] == matrices
    assert [run["ranks"] for run in result["runs"]] == [1, RANKS]
    alone, together = result["runs"]
    assert alone["wire_bytes"] == {}
    gradients = (dedicated + matrices) * 4  # float32, and a flag for each
    assert together["wire_bytes"] == {
        "broadcast": layer_passes * dedicated // LAYERS * item_bytes,
        "all_to_all": gradients,
        "agreement": 2 * 10 * 8,  # at forward and backward ten numbers, to compare the calls
    }
    assert together["broadcast_floor_bytes"] == together["wire_bytes"]["broadcast"]
    for run in result["runs"]:
        check_run(run, contenders, matrices)
    if "gather" in others:
        check_traffic(together, dedicated)
    rounding = 1e-4 if item_bytes == 4 else 5e-2
    assert result["loss_difference_between_ranks"] < rounding
    assert "ratios" in table
    assert table.count("same start, finite, falling") == 2
    assert table.count("times as long as its matrix products alone") == 2


def check_run(run: dict[str, Any], contenders: tuple[str, ...], matrices: int) -> None:
    assert run["newton_schulz_per_step"] == matrices
    assert run["optimizer_per_products"] > 0
    assert run["parity"] == dict.fromkeys(("same_start", "finite", "falling", "same_weights"), True)
    assert set(run["differences"]) == set(contenders[2:]) - {"alone"}
    assert 0 < run["peak_bytes"]["dmuon"] < 1.2 * run["peak_bytes"]["adamw"]
    assert run["best_other"] is None or run["best_other"]["name"] in contenders[2:]
    for name in contenders:
        losses = run["losses"][name]
        assert len(losses) == WARMUP + 1 + REPEATS * STEPS  # one is counted, not timed
        assert all(math.isfinite(loss) for loss in losses)
        assert set(run["phases"][name]) == set(run["cpu_seconds"][name]) == set(PHASES)
        assert [len(block) for block in run["step_seconds"][name]] == [STEPS] * REPEATS
    for name in contenders[1:]:
        ratio = run["step_ratio"][name]
        assert len(ratio["rounds"]) == REPEATS
        ordered = [ratio["min"], ratio["tenths"][0], ratio["quartiles"][0], ratio["median"]]
        assert ordered[0] > 0
        assert ordered == sorted(ordered)


def check_traffic(run: dict[str, Any], dedicated: int) -> None:
    """What torch is asked for, what DMuon counts and what the kernel sends, against each other."""
    payload, sent = run["payload_bytes"], run["sent_bytes"]
    assert not sum(payload["alone"].values())
    assert payload["dmuon"]["broadcast"] == run["wire_bytes"]["broadcast"]
    # DMuon counts what goes in; more comes out where somebody owns more
    assert 1 <= payload["dmuon"]["all_to_all"] / run["wire_bytes"]["all_to_all"] < 1.3
    whole = dedicated * 4  # updates travel in float32
    assert payload["gather"]["all_gather"] > payload["adamw"]["all_gather"] + whole - 1
    assert payload["alltoall"]["all_gather"] == payload["adamw"]["all_gather"]
    assert 2 * whole / RANKS <= payload["alltoall"]["all_to_all"] < 4 * whole / RANKS
    # of matrices this small, the frames of gloo are a part that counts; what the kernel has not
    # sent yet at the end of a turn counts with the next contender
    gathered = (RANKS - 1) * whole
    assert 0.9 * gathered <= sent["gather"] - sent["adamw"] < 1.4 * gathered
    exchanged = 2 * gathered / RANKS
    assert 0.9 * exchanged <= sent["alltoall"] - sent["adamw"] < 1.4 * exchanged


def test_torchs_own_muon_takes_part_and_work_grows_with_the_ranks(tmp_path: Path) -> None:
    more = ("--ranks", "1,2", "--contenders", "adamw,dmuon,torch_muon", "--weak", "--threads", "1")
    table, result = run_command(tmp_path / "bench.json", *more)
    tokens = int(TINY["batch"]) * int(TINY["sequence"])
    assert [run["tokens"] for run in result["runs"]] == [tokens, 2 * tokens]
    assert [run["threads"] for run in result["runs"]] == [1, 1]
    for run in result["runs"]:
        assert 1e-3 < run["differences"]["torch_muon"] < run["tolerances"]["torch_muon"]
    assert result["scaling"]["torch_muon"][0] == 1.0
    assert result["loss_difference_between_ranks"] is None
    assert "weak scaling, DMuon" in table


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", "1,two"], "whole numbers"),
        (["--ranks", "0"], "at least 1"),
        (["--ranks", "2,2"], "twice"),
        (["--ranks", "3"], "multiple of each of 3"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--timeout", "0"], "--timeout must be at least 1"),
        (["--vocabulary", "255"], "--vocabulary must be at least 256"),
        (["--contenders", "adamw,dmuon,sgd"], "there is no 'sgd', only adamw, dmuon, gather"),
        (["--contenders", "adamw,gather"], "dmuon always take part"),
        (["--contenders", "adamw,dmuon,adamw"], "names one twice"),
        pytest.param(
            ["--contenders", "adamw,dmuon,muon_fsdp2"],
            "pip install muon-fsdp2",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("muon_fsdp2") is not None, reason="it is installed"
            ),
        ),
        (["--preset", "11m"], "invalid choice: '11m'"),
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
    twice = {"tenths": [1.5, 1.5], "quartiles": [1.5, 1.5]}
    assert spread([1.5]) == {**twice, "median": 1.5, "min": 1.5, "max": 1.5}


def test_a_machine_of_one_operation_a_second_takes_as_many_seconds_as_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(size: int, product: tuple[int, int, int], *_: object) -> float:
        return 2.0 * size * math.prod(product)

    monkeypatch.setattr(bound, "_batch_seconds", seconds)
    shapes = [(24, 24), (24, 24), (24, 50), (128, 640), (640, 128)]  # batches, both forms
    operations = sum(newton_schulz_flops(*shape) for shape in shapes)
    assert bound.product_seconds(shapes, torch.device("cpu"), torch.float32) == operations


def test_where_ranks_take_turns_products_are_timed_by_what_they_use() -> None:
    def idle() -> None:
        time.sleep(0.02)

    assert bound._host_seconds(idle, crowding=1.0) >= 0.02
    assert bound._host_seconds(idle, crowding=2.0) < 0.01


def test_the_optimizer_is_compared_with_the_products_of_the_rank_that_has_most() -> None:
    def report(product_seconds: float, *optimizer: float) -> RankReport:
        rounds = [{"dmuon": Turn([Laps(9.0, 9.0, seconds)], [], None)} for seconds in optimizer]
        facts = ModelFacts(0, 0, 0, 0, 0.0)
        return RankReport(rounds, {}, {}, {}, 0, product_seconds, {}, {}, facts)

    reports = [report(0.0, 7.0, 7.0, 7.0), report(2.0, 3.0, 2.5, 50.0)]
    assert optimizer_per_products(reports) == 1.5


@pytest.mark.parametrize("difference", [0.2, math.nan])
def test_parity_tells_what_does_not_hold(difference: float) -> None:
    losses = {"adamw": [5.5, 5.0], "dmuon": [5.5, math.nan], "gather": [5.5, 5.0]}
    assert parity(losses, {"gather": difference}, {"gather": 0.1}) == {
        "same_start": True,
        "finite": False,
        "falling": False,
        "same_weights": False,
    }


def test_dmuon_is_compared_with_the_fastest_other_muon() -> None:
    steps = {"adamw": [[1.0]], "dmuon": [[1.2]], "gather": [[3.0]], "alltoall": [[1.5]]}
    optimizers = {"dmuon": [[0.2]], "gather": [[0.1]], "alltoall": [[0.4]]}
    best = best_other(steps, optimizers)
    assert best is not None
    assert best["name"] == "alltoall"
    assert best["step_ratio"]["median"] == pytest.approx(0.8)
    assert best["optimizer_ratio"]["median"] == pytest.approx(0.5)


def test_memory_of_one_contender_is_what_it_holds_and_takes_on_the_way() -> None:
    def allocate(mib: int) -> torch.Tensor:
        return torch.empty(mib * 2**20, dtype=torch.uint8)

    ours, theirs = HostFootprint(), HostFootprint()
    with ours.building():
        weights = allocate(10)
    with theirs.building():
        other = allocate(500)
    with ours.turn(is_timed=False):
        moments = allocate(20)  # stays
        allocate(40)
    with ours.turn(is_timed=True):
        allocate(900)  # nobody looks
    with ours.turn(is_timed=False):
        del weights
        allocate(50)
    assert ours.peak == 70 * 2**20  # 10 and 20 that stay, then 40; or 20, then 50
    assert theirs.peak == 0
    del moments, other


def test_the_largest_difference_of_a_loss_shows_nan() -> None:
    def run(*losses: float) -> dict[str, dict[str, list[float]]]:
        return {"losses": {"dmuon": list(losses)}}

    assert loss_difference([run(5.0, 4.0), run(5.0, 4.5)]) == 0.5
    assert math.isnan(loss_difference([run(5.0, 4.0), run(math.nan, 4.5)]))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_about_as_many_parameters_as_they_say(name: str) -> None:
    settings = Settings(**PRESETS[name])
    with torch.device("meta"):
        model = decoder.build(settings)
    number = sum(param.numel() for param in model.parameters())
    unit = {"m": 1e6, "b": 1e9}
    said = 17e6 if name == "orient" else float(name[:-1]) * unit[name[-1]]
    assert number == pytest.approx(said, rel=0.15)
    if name == "10m":
        assert settings == Settings()
