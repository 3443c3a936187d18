"""``dmuon sweep`` for real: trained, gone on with, compared, drawn and told to MLflow."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import mlflow
import pytest
from dmuon_platform import cli
from dmuon_platform.data import prepare_dataset
from dmuon_platform.driver_lease import DriverLease
from dmuon_platform.events import EVENTS_FILE, Journal
from dmuon_platform.run_folder import DATA_FOLDER
from dmuon_platform.spec import JobSpec
from dmuon_platform.spool import METRICS_FILE, MetricsSpool
from ranks_runner import run_ranks
from worker_runs import run_worker, worker_job

HERE = Path(__file__)
FIRST = ["--grid", "optimizer.algorithm=muon", "optimizer.lr=0.02"]
ADAMW = ["--grid", "optimizer.algorithm=adamw", "optimizer.adamw_lr=1e20"]
MORE = ["--grid", "optimizer.algorithm=muon", "optimizer.lr=0.02,0.04"]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A small one, whose text is prepared, so that no Ray is needed."""
    document = {
        "name": "small",
        "storage": str(tmp_path / "runs"),
        "model": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
        "data": {"source": str(HERE.parent / "test_c*.py"), "sequence_length": 32},
        "train": {"steps": 6, "global_batch_size": 4, "micro_batch_size": 2},
        "evaluation": {"every": 3, "sequences": 4},
    }
    spec = JobSpec.model_validate(document)
    prepare_dataset(spec.data, spec.run_dir.parent / DATA_FOLDER)
    path = tmp_path / "small.json"
    path.write_text(json.dumps(document))
    return path


def test_a_sweep_trains_what_is_left_and_tells_what_came_of_all(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = job.parent / "runs" / "small-sweep"
    assert cli.main(["sweep", str(job), *FIRST, *ADAMW, "--parallel", "2"]) == 0
    output = capsys.readouterr().out
    assert "2 trainings, 0 of them done before" in output
    assert "adamw_lr-1e20-seed-0: diverged" in output
    curves = {path: path.read_bytes() for path in folder.glob(f"*/{METRICS_FILE}")}

    assert cli.main(["sweep", str(job), *MORE, *ADAMW]) == 0
    output = capsys.readouterr().out
    assert "3 trainings, 2 of them done before" in output
    assert "optimizer.lr of algorithm muon" in output  # of two values the better one is at an edge
    assert {path: path.read_bytes() for path in curves} == curves

    result = json.loads((folder / "sweep.json").read_text())
    by_name = {point["name"]: point["evaluation"] for point in result["points"]}
    losses = [each["evaluation/loss"] for each in by_name.values() if each is not None]
    assert len(by_name) == 3
    assert len(set(losses)) == len(losses) == 2
    assert result["grids"][1]["best"] is None
    by_adamw = (folder / "algorithm-adamw-adamw_lr-1e20-seed-0" / METRICS_FILE).read_text()
    assert "train/lr_adamw" in by_adamw
    assert "train/lr_muon" not in by_adamw
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")

    client = mlflow.MlflowClient(f"sqlite:///{job.parent / 'runs' / 'mlflow.db'}")
    (experiment,) = [each for each in client.search_experiments() if each.name == "dmuon"]
    runs = client.search_runs([experiment.experiment_id])
    told = {run.info.run_name: run.data.metrics.get("evaluation/loss") for run in runs}
    expected = {name: each and each["evaluation/loss"] for name, each in by_name.items()}
    assert told == expected


def test_two_sweeps_at_a_time_would_write_over_each_other(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = job.parent / "runs" / "small-sweep"
    folder.mkdir()
    with DriverLease(folder, None, None):
        assert cli.main(["sweep", str(job), *FIRST]) == 3
    assert "another --output" in capsys.readouterr().err


def test_each_training_has_the_text_and_the_batch_that_its_settings_say(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = job.parent / "runs"
    data = JobSpec.model_validate_json(job.read_text()).data
    prepare_dataset(data.model_copy(update={"sequence_length": 16}), runs / DATA_FOLDER)
    lengths, batches = "data.sequence_length=16,32", "train.global_batch_size=4,1000000"
    assert cli.main(["sweep", str(job), "--grid", batches]) == 78
    assert "fewer than one batch of train.global_batch_size" in capsys.readouterr().err
    assert cli.main(["sweep", str(job), "--grid", lengths, "--parallel", "2"]) == 0
    assert "6 steps, 384 to 768 tokens each" in capsys.readouterr().out
    alone = ["--set", "data.sequence_length=16", "--output", str(job.parent / "alone")]
    assert cli.main(["sweep", str(job), *FIRST, *alone]) == 0
    results = [runs / "small-sweep" / "sweep.json", job.parent / "alone" / "sweep.json"]
    both, (one,) = ([p["evaluation"] for p in json.loads(r.read_text())["points"]] for r in results)
    assert both[0] == one != both[1]


def test_whose_process_is_killed_is_told_among_those_under_way_and_leaves_no_folder(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = job.parent / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    folder, pattern = job.parent / "runs" / "small-sweep", f"*/{EVENTS_FILE}"

    def kill_one() -> None:
        while not (launched := [Journal(f.parent).last("launched") for f in folder.glob(pattern)]):
            time.sleep(0.1)
        os.kill(launched[0]["pid"], signal.SIGKILL)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    long = ["--set", "train.steps=1000000"]
    assert cli.main(["sweep", str(job), "--grid", "optimizer.lr=0.02,0.03", *long]) == 1
    killer.join()
    error = capsys.readouterr().err
    assert "process of a training was killed: one of lr-0.02-seed-0. Look for" in error
    assert list(temporary.glob("tmp*")) == []


def test_a_sweep_over_a_fine_tuning_begins_each_training_with_what_its_start_is_worth(
    job: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="needs the hf extra")
    earlier = worker_job(tmp_path / "earlier")
    run_ranks(1, lambda _: run_worker(earlier), timeout_s=120)
    model = {"path": str(earlier.run_dir / "checkpoints" / "step-00000012")}
    document = {**json.loads(job.read_text()), "model": model}
    document["data"]["tokenizer"] = "bytes"
    job.write_text(json.dumps(document))
    grid = ["--grid", "optimizer.lr=0.02,0.04"]
    assert cli.main(["sweep", str(job), *grid]) == 0
    folders = sorted((job.parent / "runs" / "small-sweep").glob(f"*/{METRICS_FILE}"))
    starts = [MetricsSpool(file.parent).start() for file in folders]
    worth = [start.metrics["evaluation/bits_per_byte"] for start in starts if start is not None]
    assert len(worth) == 2
    assert worth[0] == worth[1] > 0
