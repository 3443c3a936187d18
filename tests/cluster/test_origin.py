"""A run goes on from its own folder when what it was started from is gone."""

import json
import re
import shutil

import mlflow
import pytest
from cluster import driver
from dmuon_platform.tracking_files import TrackingFiles
from mlflow_runs import history

pytestmark = pytest.mark.cluster

GIVEN = {
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"do_sample": true, "temperature": 0.6, "eos_token_id": 255}',
}
"""What the folder has beside the model and its tokenizer."""


def _check_given(run):
    """It lies in the newest checkpoint, in the export, and beside each registered model."""
    newest = max((run.folder / "checkpoints").glob("step-????????"))
    told = TrackingFiles(run.folder).delivered()
    client = mlflow.MlflowClient(told.uri)
    experiment = client.get_run(told.run_id).info.experiment_id
    for model in client.search_logged_models([experiment]):
        names = {each.path for each in client.list_logged_model_artifacts(model.model_id)}
        assert names >= {"tokenizer.json", *GIVEN}
    for folder in (newest, run.folder / "export"):
        assert {name: (folder / name).read_text() for name in GIVEN} == GIVEN


def _fine_tuning(earlier, text, start):
    """A job that starts from copies of an earlier run's export, and of its text."""
    shutil.copytree(earlier.folder / "export", start / "model")
    for name, content in GIVEN.items():
        (start / "model" / name).write_text(content)
    shutil.copyfile(text, start / "text.txt")
    run = driver.make_run(start.parent, start / "text.txt", steps=10)
    head, _, rest = run.job.read_text().partition("[model]")
    model = f'[model]\npath = "{start / "model"}"\n\n[data]'
    run.job.write_text(head + model + rest.partition("[data]")[2])
    return run


def _check_start(run, earlier, output):
    """What it starts from is what the earlier run came to, wherever that is shown."""
    begun, ended = run.metrics()[0], earlier.metrics()[driver.STEPS]
    assert begun["evaluation/loss"] == pytest.approx(ended["evaluation/loss"], rel=1e-5)
    (line,) = re.findall("evaluation before the first step: loss .*", output)
    assert line in driver.run("logs", run.folder)[1]
    assert f"{begun['evaluation/bits_per_byte']:.3f} bits per byte" in line
    page = (run.folder / "report.html").read_text()
    bits = f"{begun['evaluation/bits_per_byte']:.3f} bits per byte"
    assert f"before the first step {begun['evaluation/loss']:.3f}, {bits}." in page
    told = TrackingFiles(run.folder).delivered()
    _check_given(run)
    points = history(told.uri, told.run_id, "evaluation/loss")
    assert points[0] == (0, begun["evaluation/loss"])
    params = mlflow.MlflowClient(told.uri).get_run(told.run_id).data.params
    assert params["tracking.uri"] == params["train.tokens"] == "none"


def test_a_run_goes_on_without_the_model_and_the_text_that_it_was_started_from(
    reference, text, tmp_path
):
    pytest.importorskip("transformers", reason="needs the hf extra")
    earlier, _ = reference
    start = tmp_path / "start"
    run = _fine_tuning(earlier, text, start)
    code, output = driver.run("run", run.job)
    assert code == 0, output
    _check_start(run, earlier, output)
    export = json.loads((run.folder / "export" / "config.json").read_text())

    shutil.rmtree(start)
    for job in (run.job, run.folder / "job.toml"):
        code, output = driver.run("validate", job, "--set", "train.steps=20")
        assert code == 0, output
    unfinished = run.folder / "checkpoints" / "step-00000005.writing-a0"
    unfinished.mkdir()
    code, output = driver.run("resume", run.folder, "--set", "train.steps=20")
    assert code == 0, output
    assert output.count(f"{unfinished} is not a whole checkpoint") == 1, output
    assert ("UserWarning" in output, len(run.events("checkpoint_damaged"))) == (False, 1)
    for said in (
        "its text is not where data.source says",
        "rate rises again after step 10",
        "another job: train.steps: 10 -> 20",
    ):
        assert output.count(said) == 1, output
    assert run.events("training_started")[-1]["step"] == 10
    metrics = run.metrics()
    assert sorted(metrics) == list(range(21))
    assert [event["step"] for event in run.events("evaluated")] == [0, 10, 20]
    assert metrics[11]["train/loss"] == pytest.approx(metrics[10]["train/loss"], abs=0.3)
    assert json.loads((run.folder / "export" / "config.json").read_text()) == export
    _check_given(run)

    shutil.rmtree(run.folder / "checkpoints")
    code, output = driver.run("resume", run.folder, "--set", "train.steps=30")
    assert code == 78, output
    assert "there is no such folder" in output
