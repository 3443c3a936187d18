"""A job that is asked to stop: it saves, says 75, and goes on where it was."""

import os
import signal

import pytest
from cluster import driver

pytestmark = pytest.mark.cluster


def test_a_stopped_run_goes_on_at_the_exact_step_and_ends_like_the_undisturbed_one(
    reference, text, tmp_path
):
    """Stopped by SIGTERM to a worker, by Ctrl-C at the driver, then left alone."""
    undisturbed, _ = reference
    run = driver.make_run(tmp_path, text)
    process = driver.start("run", run.job)
    driver.wait_until((run.folder / "driver.json").exists, process)
    code, output = driver.run("run", run.job)
    assert code == 3, output
    assert f"is already being run by process {process.pid} on" in output
    driver.wait_until(lambda: max(run.metrics(), default=0) >= 13, process)
    os.kill(run.events("training_started")[-1]["workers"][1]["pid"], signal.SIGTERM)
    code, output = driver.finish(process)
    assert code == 75, output
    assert "rank 1 got SIGTERM" in output

    first = run.events("stopped")[-1]["step"]
    process = driver.start("run", run.job)
    driver.wait_until(lambda: max(run.metrics(), default=0) >= first + 3, process)
    os.kill(process.pid, signal.SIGINT)
    code, output = driver.finish(process)
    assert code == 75, output
    assert "Run it again" in output
    assert not (run.folder / "stop.json").exists()
    assert driver.tracked_status(run) == "KILLED"

    code, output = driver.run("run", run.job)
    assert code == 0, output
    stopped = [event["step"] for event in run.events("stopped")]
    assert stopped == [event["checkpoint"] for event in run.events("stopped")]
    assert [event["step"] for event in run.events("training_started")] == [0, *stopped]
    assert not run.replays(), "no step was done twice"
    assert run.results() == undisturbed.results()
    assert [event["exit_code"] for event in run.events("ended")] == [75, 75, 0]
