"""The main job, small: from a job file to a model that somebody else can load."""

import hashlib
import json
import os
import signal
from pathlib import Path

import pytest
from cluster import driver
from printed import block

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def tracking(reference):
    """The MLflow client of the reference run, and that run."""
    mlflow = pytest.importorskip("mlflow")
    run, _ = reference
    return _tracked(mlflow, run)


def _tracked(mlflow, run):
    client = mlflow.MlflowClient(f"sqlite:///{run.folder.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("dmuon")
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 1, "one run over all attempts"
    return client, runs[0]


def test_the_model_learns_the_text_better_than_a_bigram_model(reference):
    run, output = reference
    metrics = run.metrics()
    assert sorted(metrics) == list(range(1, driver.STEPS + 1))
    assert metrics[driver.STEPS]["train/loss"] < 0.6 * metrics[1]["train/loss"]
    (finished,) = run.events("finished")
    assert finished["bits_per_byte"] < finished["bigram_bits_per_byte"]
    assert f"{finished['bits_per_byte']:.3f}" in output
    assert f"{finished['bigram_bits_per_byte']:.3f}" in output


def test_mlflow_has_one_curve_and_all_facts_of_the_run(reference, tracking):
    run, _ = reference
    client, tracked = tracking
    assert tracked.info.status == "FINISHED"
    history = client.get_metric_history(tracked.info.run_id, "train/loss")
    told = {point.step: point.value for point in history}
    assert len(history) == driver.STEPS
    assert told == {step: m["train/loss"] for step, m in run.metrics().items()}
    assert tracked.data.tags["weights_sha256"] == run.events("trained")[-1]["weights_sha256"]
    assert tracked.data.params["train.steps"] == str(driver.STEPS)
    (finished,) = run.events("finished")
    bigram = finished["bigram_bits_per_byte"]
    assert tracked.data.metrics["evaluation/bigram_bits_per_byte"] == bigram


def test_the_registered_version_tells_its_origin_and_the_run_has_pictures(reference, tracking):
    run, _ = reference
    client, tracked = tracking
    (version,) = client.search_model_versions("name = 'small'")
    checkpoint = Path(run.events("finished")[0]["checkpoint"])
    manifest = (checkpoint / "manifest.json").read_bytes()
    assert version.tags["checkpoint.uri"] == checkpoint.as_uri()
    assert version.tags["checkpoint.manifest_sha256"] == hashlib.sha256(manifest).hexdigest()
    for tag in ("weights_sha256", "dataset.digest", "spec_digest", "git.commit"):
        assert version.tags.get(tag) == tracked.data.tags.get(tag)
    assert {"weights_sha256", "dataset.digest", "spec_digest"} <= version.tags.keys()
    plots = {Path(each.path).stem for each in client.list_artifacts(tracked.info.run_id, "plots")}
    assert plots == {
        *("loss", "throughput", "learning_rates", "gradient_norm", "step_time", "goodput"),
        *("ownership", "spectral_norm", "orthogonality", "update_size"),
    }


def test_the_report_at_the_end_and_in_mlflow_has_the_numbers_of_the_run(reference, tracking):
    run, _ = reference
    client, tracked = tracking
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    kept = client.download_artifacts(tracked.info.run_id, "report/report.html")
    assert Path(kept).read_text(encoding="utf-8") == page
    newest = run.metrics()[driver.STEPS]
    assert f"<b>{newest['train/loss']:.4f}</b><span>training loss of the last step" in page
    assert f"<b>{newest['evaluation/loss']:.4f}</b><span>held-out loss" in page
    assert 'good">finished' in page
    plan = run.events("training_started")[0]["plan"]
    assert page.count('<span class="name">') == sum(plan["num_matrices_per_owner"])
    looks = {line["step"]: line["metrics"] for line in run.lines("updates.jsonl")}
    assert list(looks) == [1, driver.STEPS]
    for key, value in looks[driver.STEPS].items():
        if key.endswith("/spectral_norm"):
            assert f">{value:.3f}</td>" in page
    told = client.get_metric_history(tracked.info.run_id, "muon/spectral_norm_max")
    assert [point.step for point in told] == [1, driver.STEPS]
    assert "Muon and training: not healthy" not in page


def test_the_guide_names_everything_in_the_folder_of_a_run(reference):
    run, _ = reference
    guide = (Path(__file__).parents[2] / "platform" / "README.md").read_text(encoding="utf-8")
    assert [e.name for e in run.folder.iterdir() if f"`{e.name}" not in guide] == []


def test_status_tells_what_the_run_has_come_to(reference):
    run, _ = reference
    code, output = driver.run("status", run.folder, "--json")
    assert code == 0
    told = json.loads(output)
    assert (told["state"], told["step"], told["num_steps"]) == ("finished", *[driver.STEPS] * 2)
    assert told["loss"] == run.metrics()[driver.STEPS]["train/loss"]
    assert told["checkpoint"]["path"] == run.events("finished")[0]["checkpoint"]


def test_the_registered_model_generates_text_with_transformers(
    reference, tracking, tmp_path, capsys
):
    transformers = pytest.importorskip("transformers")
    client, _ = tracking
    program = block("jobs/README.md", "the registered model", "python")
    for printed, ours in (
        ("sqlite:///runs/mlflow.db", client.tracking_uri),
        ("tiny_cpu", "small"),
        ('/latest"', f'/latest", dst_path="{tmp_path}"'),
    ):
        assert printed in program
        program = program.replace(printed, ours)
    exec(program, {})
    text = capsys.readouterr().out.removesuffix("\n")
    assert text.startswith("    def __init__(")
    assert len(text) > len("    def __init__(")
    run, _ = reference
    checkpoint = Path(run.events("finished")[0]["checkpoint"])
    assert transformers.AutoTokenizer.from_pretrained(checkpoint)("def").input_ids == [*b"def"]


def test_a_finished_job_says_so_and_does_nothing(reference):
    run, _ = reference
    before = [(run.folder / name).read_text() for name in ("events.jsonl", "job.toml")]
    for fewer in ([], ["--set", f"train.steps={driver.STEPS // 2}"]):
        code, output = driver.run("run", run.job, *fewer)
        assert code == 0, output
        assert "already finished" in output
    after = [(run.folder / name).read_text() for name in ("events.jsonl", "job.toml")]
    assert after == before


def test_after_a_killed_worker_the_run_is_bit_for_bit_the_undisturbed_one(
    reference, text, tmp_path
):
    mlflow = pytest.importorskip("mlflow")
    undisturbed, _ = reference
    run = driver.make_run(tmp_path, text)
    process = driver.start("run", run.job)
    driver.wait_until(lambda: max(run.metrics(), default=0) >= 25, process)
    (started,) = run.events("training_started")
    os.kill(started["workers"][1]["pid"], signal.SIGKILL)
    code, output = driver.finish(process)
    assert code == 0, output

    assert run.metrics() == undisturbed.metrics()
    (trained,) = run.events("trained")
    assert trained["weights_sha256"] == undisturbed.events("trained")[-1]["weights_sha256"]
    assert run.replays(), "steps after the checkpoint were done again"
    assert all(not replay["replay"] for replay in run.replays())
    (restarted,) = run.events("restarted")
    assert "rank 1 died" in restarted["cause"]

    client, tracked = _tracked(mlflow, run)
    assert len(client.get_metric_history(tracked.info.run_id, "train/loss")) == driver.STEPS
    assert tracked.data.tags["restarts"] == "1"
    assert "rank 1 died" in tracked.data.tags["restart.1.cause"]
