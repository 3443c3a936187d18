"""A real MLflow server that dies, hangs and comes back: training never waits, all points arrive."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import matplotlib.font_manager  # noqa: F401 - takes the tests' folder before `nothing_stays` hides it
import mlflow
import psutil
import pytest
from dmuon_platform.events import Journal
from dmuon_platform.finding import State
from dmuon_platform.service_checks import check_mlflow
from dmuon_platform.spool import MetricsSpool
from dmuon_platform.tracking import FINISH_S, Tracker, deliver_pending
from dmuon_platform.tracking_files import TrackingFiles
from mlflow_runs import drain_of, history, job, start_attempt, train, wait_for

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path, monkeypatch):
    """No process outlives its test, and nothing is left in the home or current folder."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # drains in this process set it
    monkeypatch.delenv("MPLCONFIGDIR")  # that of the tests, where a user has none
    monkeypatch.chdir(here)
    yield
    assert drains() == []
    assert [*home.iterdir(), *here.iterdir()] == []


def drains() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [each for each in children if "dmuon_platform.drain" in each.cmdline()]


def told(spec) -> int:
    return TrackingFiles(spec.run_dir).delivered().offsets.get("metrics.jsonl", 0)


def test_a_server_killed_and_restarted_mid_way_has_every_point_once(server, tmp_path):
    spec = job(tmp_path / "runs", server.uri)
    with Tracker(spec, {"dataset": {"digest": "d" * 64, "folder": "/data"}}) as tracker:
        start_attempt(spec, 1, 0)
        train(spec, 1, 10)
        wait_for(lambda: told(spec) > 0)
        assert check_mlflow(server.uri, tmp_path).state is State.GOOD
        server.kill()
        assert check_mlflow(server.uri, tmp_path).state is State.POOR
        train(spec, 11, 30)  # would wait for ever if it waited for the server
        Journal(spec.run_dir).append("restarted", step=20, cause="rank 1 was killed")
        wait_for(lambda: TrackingFiles(spec.run_dir).delivered().problem is not None)
        server.start()
        start_attempt(spec, 2, 20)
        train(spec, 21, 50)
        delivery = tracker.finish("FINISHED")
    assert delivery.is_complete, delivery.problem
    noted = [e for e in Journal(spec.run_dir).read() if e["kind"].startswith("tracking")]
    assert [event["kind"] for event in noted] == ["tracking_failed", "tracking_works"]
    assert noted[0]["problem"] == f"{server.uri} does not answer"
    assert delivery.run_id is not None
    losses = history(server.uri, delivery.run_id, "train/loss")
    assert losses == [(step, 1 / step) for step in range(1, 51)]
    run = mlflow.MlflowClient(server.uri).get_run(delivery.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["restart.1.cause"] == "rank 1 was killed"
    assert run.data.tags["attempts"] == "2"
    assert run.data.tags["continuation.equal_steps"] == "10"
    assert run.data.params["train.steps"] == "50"


def test_a_server_dead_at_the_end_costs_seconds_and_all_arrives_later(server, tmp_path):
    spec = job(tmp_path / "runs", server.uri)
    server.kill()
    with Tracker(spec, {}) as tracker:
        train(spec, 1, 50)
        started = time.monotonic()
        delivery = tracker.finish("FINISHED")
    assert time.monotonic() - started < FINISH_S  # for a server that answers
    assert not delivery.is_complete
    assert delivery.problem
    server.start()
    later = deliver_pending(spec)
    assert later.is_complete, later.problem
    assert later.run_id is not None
    losses = history(server.uri, later.run_id, "train/loss")
    assert [step for step, _ in losses] == list(range(1, 51))
    assert mlflow.MlflowClient(server.uri).get_run(later.run_id).info.status == "FINISHED"
    assert deliver_pending(spec) == later


def test_a_server_that_hangs_is_given_up_in_seconds(server, tmp_path):
    spec = job(tmp_path / "runs", server.uri)
    with Tracker(spec, {}) as tracker:
        train(spec, 1, 10)
        wait_for(lambda: told(spec) > 0)
        server.freeze()
        train(spec, 11, 20)
        started = time.monotonic()
        delivery = tracker.finish("FINISHED")
    assert time.monotonic() - started < FINISH_S
    assert not delivery.is_complete
    server.thaw()
    assert drain_of(spec).deliver()
    assert delivery.run_id is not None
    losses = history(server.uri, delivery.run_id, "train/loss")
    assert [step for step, _ in losses] == list(range(1, 21))


def test_a_drain_killed_between_delivery_and_offset_doubles_nothing(server, tmp_path):
    spec = job(tmp_path / "runs", server.uri)
    train(spec, 1, 20)
    drain = drain_of(spec)
    assert drain.deliver()
    files = TrackingFiles(spec.run_dir)
    delivered = files.delivered()
    _, third = MetricsSpool(spec.run_dir).read_from(0, max_records=3)
    delivered.offsets = {"metrics.jsonl": third}  # it was told more, and that not written down
    files.save(delivered)
    train(spec, 21, 30)
    assert drain_of(spec).deliver()
    run_id = files.delivered().run_id
    assert run_id is not None
    for key in ("train/loss", "speed/tokens_per_s"):
        steps = [step for step, _ in history(server.uri, run_id, key)]
        assert steps == list(range(1, 31))


def test_with_its_tracking_state_lost_the_run_is_found_again_by_its_key(server, tmp_path):
    spec = job(tmp_path / "runs", server.uri)
    train(spec, 1, 10)
    assert drain_of(spec).deliver()
    files = TrackingFiles(spec.run_dir)
    first = files.delivered().run_id
    (files.folder / "delivered.json").write_text("{")
    train(spec, 11, 20)
    assert drain_of(spec).deliver()
    second = files.delivered().run_id
    assert second is not None
    assert second == first
    assert len(history(server.uri, second, "train/loss")) == 20


def test_a_killed_driver_takes_its_drain_along_after_a_last_delivery(server, tmp_path):
    spec = job(tmp_path / "runs", server.uri)
    script = (
        "import sys, time; sys.path[:0] = sys.argv[3:]\n"
        "from pathlib import Path\n"
        "from mlflow_runs import job, train\n"
        "from dmuon_platform.tracking import Tracker\n"
        "spec = job(Path(sys.argv[1]), sys.argv[2])\n"
        "with Tracker(spec, {}):\n"
        "    train(spec, 1, 10)\n"
        "    print(flush=True)\n"
        "    time.sleep(1000)\n"
    )
    paths = [p for p in sys.path if p]
    command = [sys.executable, "-c", script, str(tmp_path / "runs"), server.uri, *paths]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert driver.stdout is not None
    driver.stdout.readline()
    (drain,) = psutil.Process(driver.pid).children()
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    wait_for(lambda: not drain.is_running() or drain.status() == psutil.STATUS_ZOMBIE)
    run_id = TrackingFiles(spec.run_dir).delivered().run_id
    assert run_id is not None
    assert len(history(server.uri, run_id, "train/loss")) == 10


def test_ctrl_c_waits_for_no_drain_and_it_tells_the_rest_alone(server, tmp_path: Path):
    spec = job(tmp_path / "runs", server.uri)
    with suppress(KeyboardInterrupt), Tracker(spec, {}):
        train(spec, 1, 10)
        (drain,) = drains()
        drain.suspend()
        raise KeyboardInterrupt
    assert drain.status() == psutil.STATUS_STOPPED
    drain.resume()
    drain.wait(60)
    run_id = TrackingFiles(spec.run_dir).delivered().run_id
    assert run_id is not None
    assert mlflow.MlflowClient(server.uri).get_run(run_id).info.status == "KILLED"
    assert len(history(server.uri, run_id, "train/loss")) == 10


def test_a_killed_drain_is_replaced_at_the_end(server, tmp_path: Path):
    spec = job(tmp_path / "runs", server.uri)
    scratch = TrackingFiles(spec.run_dir).scratch
    with Tracker(spec, {}) as tracker:
        train(spec, 1, 10)
        wait_for(lambda: told(spec) > 0)
        (drain,) = drains()
        assert drain.environ()["TMPDIR"] == str(scratch)
        (scratch / "tmpabc" / "checkpoints").mkdir(parents=True)  # on its way to MLflow
        (scratch / "tmpdef").touch()
        drain.kill()
        train(spec, 11, 20)
        delivery = tracker.finish("FINISHED")
    assert delivery.is_complete, delivery.problem
    assert delivery.run_id is not None
    assert len(history(server.uri, delivery.run_id, "train/loss")) == 20
    assert list(scratch.iterdir()) == []
