"""What another attempt would only repeat ends a run; mended, it goes on as if nothing had been."""

import pytest
from cluster import driver

pytestmark = pytest.mark.cluster

DEAD_SERVER = "http://127.0.0.1:9"  # a port on which nobody listens
KEEP = "checkpoint.keep_last=3"


def test_errors_that_come_back_end_the_run_which_goes_on_from_what_is_whole(
    reference, text, tmp_path
):
    """Launched three times: an error that comes back, a loss that is no number, and no MLflow."""
    undisturbed, _ = reference
    run = driver.make_run(tmp_path, text)
    twice = 'faults.inject=[{kind = "raise", step = 37, rank = 1, times = 9}]'
    code, output = driver.run("run", run.job, *driver.settings(KEEP, twice))
    assert code == 70, output
    assert "injected" in output
    restarted = run.events("restarted")
    assert 1 <= len(restarted) <= 3, "the step is told by the newest metric, which may be behind"
    assert not any(each["is_loss"] for each in restarted)
    assert "The run failed: " in (report := (run.folder / "report.html").read_text())
    assert "injected" in report

    checkpoints = run.folder / "checkpoints"
    cut = max((checkpoints / "step-00000030").glob("*.safetensors"))
    cut.write_bytes(cut.read_bytes()[:-1])
    (checkpoints / "step-00000020" / "manifest.json").unlink()
    nan = 'faults.inject=[{kind = "nan", step = 15, rank = 1}]'
    code, output = driver.run("run", run.job, *driver.settings(KEEP, nan))
    assert code == 86, output
    assert run.events("training_started")[-1]["step"] == 10, "the newest that is whole"
    assert "step-00000030" in output
    assert "The run failed: Step 15 diverged" in (run.folder / "report.html").read_text()
    assert cut.exists(), "what is damaged is never deleted"

    code, output = driver.run("run", run.job, *driver.settings(f"tracking.uri={DEAD_SERVER}"))
    assert code == 0, output
    assert run.events("training_started")[-1]["step"] == 10, "nothing after it was good"
    assert run.results() == undisturbed.results()
    assert 'good">finished' in (run.folder / "report.html").read_text(), "without a tracker too"
    assert all(not replay["replay"] for replay in run.replays())
