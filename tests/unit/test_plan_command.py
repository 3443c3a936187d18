"""``dmuon plan``: what it prints and writes, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
from dmuon_platform import cli
from dmuon_platform.outline import owner_plan
from dmuon_platform.spec import load_job

ROOT = Path(__file__).parents[2]
TINY, GPT = (str(ROOT / "jobs" / f"{name}.toml") for name in ("tiny_cpu", "gpt_125m_fsdp"))
CLUSTER = ["--gpu", "H100", "--intra", "450GB/s", "--inter", "400Gb/s", "--gpus-per-node", "8"]


def test_a_plan_is_printed_and_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "plan.json"
    assert cli.main(["plan", TINY, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "2 workers: mesh 1 x 2 (replicate x shard), each 1 x 8 sequences" in printed
    assert "TAKES" not in printed
    assert "0 of 4 blocks with hidden matrices travel whole along shard" in printed
    data = json.loads(file.read_text(encoding="utf-8"))
    plan = owner_plan(load_job(TINY), 2)
    assert data["owners"] == {m.name: plan.owner_of(m.name) for m in plan.matrices}
    assert data["time"] is None
    kinds = {each["kind"] for each in data["traffic"]}
    assert kinds == {"broadcast", "all_to_all", "all_gather", "reduce_scatter"}
    assert list(tmp_path.iterdir()) == [file]


def test_a_plan_for_sixteen_thousand_gpus_tells_time_and_advice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    batch = ["train.global_batch_size=16384", "train.micro_batch_size=1"]
    changes = ["--set", *batch, "train.tokens=1_000_000_000_000"]
    assert cli.main(["plan", GPT, "--workers", "16384", *CLUSTER, *changes]) == 0
    printed = capsys.readouterr().out
    assert "mesh 1 x 16384" in printed
    assert "16,300 of 16,384 ranks own no matrix: there are 84" in printed
    assert "than with AdamW under FSDP2" in printed
    assert "mesh 2048 x 8 (replicate x shard) would take" in printed


def test_a_step_that_takes_several_times_as_long_is_told_as_that(
    capsys: pytest.CaptureFixture[str],
) -> None:
    batch = ["train.global_batch_size=1", "train.micro_batch_size=1", "data.sequence_length=64"]
    changes = ["--set", *batch, "mesh.replicate=none", "mesh.shard=1"]
    job = "jobs/llama_1b_hsdp.toml"
    assert cli.main(["plan", job, "--workers", "1", *CLUSTER, *changes]) == 0
    assert re.search(r"takes \d+\.\d times as long as with AdamW", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "3"], "16 sequences do not divide into 3 workers"),
        (["--workers", "6", "--set", "mesh.shard=4", "mesh.replicate=2"], "do not fit 6 workers"),
        (["--workers", "0"], "resources.workers"),
        (["--set", "optimizer.algorithm=adamw"], "nothing has an owner"),
        (
            ["--workers", "16385", "--set", "train.global_batch_size=131080"],
            "for 16,384 workers at most, not 16,385: set --workers",
        ),
        (["--gpu", "h900"], "there is no GPU 'h900'; choose one of a100, h100"),
        (["--gpu", "h100", "--intra", "450"], "--intra '450' is no rate above zero"),
        (["--gpu", "h100", "--inter", "0GB/s"], "write a number and a unit, such as 450GB/s"),
        (["--inter", "50GB/s"], "add --gpu h100"),
        (["--gpu", "h100", "--achieved", "40"], "achieved is a part of the peak, 0 to 1; got 40"),
        (["--gpu", "h100", "--gpus-per-node", "0"], "gpus_per_node must be 1 or more, got 0"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_way_out(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", TINY, *options]) == 78
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", TINY, "--json", "/nowhere/plan.json"]) == 1
    assert "--json /nowhere/plan.json cannot be written" in capsys.readouterr().err
