"""A run goes on from its own folder when what it was started from is gone."""

import json
import shutil

import pytest
from cluster import driver

pytestmark = pytest.mark.cluster


def test_a_run_goes_on_without_the_model_and_the_text_that_it_was_started_from(
    reference, text, tmp_path
):
    pytest.importorskip("transformers", reason="needs the hf extra")
    earlier, _ = reference
    start = tmp_path / "start"
    shutil.copytree(earlier.folder / "export", start / "model")
    shutil.copyfile(text, start / "text.txt")
    run = driver.make_run(tmp_path, start / "text.txt", steps=10)
    head, _, rest = run.job.read_text().partition("[model]")
    model = f'[model]\npath = "{start / "model"}"\n\n[data]'
    run.job.write_text(head + model + rest.partition("[data]")[2])
    code, output = driver.run("run", run.job)
    assert code == 0, output
    export = json.loads((run.folder / "export" / "config.json").read_text())

    shutil.rmtree(start)
    code, output = driver.run("resume", run.folder, "--set", "train.steps=20")
    assert code == 0, output
    assert "its text is not where data.source says" in output
    assert run.events("training_started")[-1]["step"] == 10
    metrics = run.metrics()
    assert sorted(metrics) == list(range(1, 21))
    assert metrics[11]["train/loss"] == pytest.approx(metrics[10]["train/loss"], abs=0.3)
    assert json.loads((run.folder / "export" / "config.json").read_text()) == export
    assert (run.folder / "export" / "tokenizer.json").is_file()

    shutil.rmtree(run.folder / "checkpoints")
    code, output = driver.run("resume", run.folder, "--set", "train.steps=30")
    assert code == 78, output
    assert "holds no config.json" in output
