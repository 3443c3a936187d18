"""A job that is asked to stop: it saves, says 75, and goes on where it was."""

import os
import signal

import pytest
from cluster import driver

pytestmark = pytest.mark.cluster


def test_a_worker_that_gets_sigterm_stops_the_run(reference, text, tmp_path):
    undisturbed, _ = reference
    run = driver.make_run(tmp_path, text)
    process = driver.start("run", run.job)
    driver.wait_until(lambda: max(run.metrics(), default=0) >= 13, process)
    (started,) = run.events("training_started")
    os.kill(started["workers"][1]["pid"], signal.SIGTERM)
    code, output = driver.finish(process)
    assert code == 75, output
