"""What is lost in a run comes back: controller, frozen rank, damaged records, head, driver."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from cluster import driver

pytestmark = pytest.mark.cluster


def _damage_what_ray_remembers(run, process):
    """Cut Ray's snapshot, and take older folders away that it names: it could not start."""
    snapshot = run.folder / "ray" / "checkpoint_manager_snapshot.json"
    driver.wait_until(snapshot.exists, process)
    snapshot.write_bytes(snapshot.read_bytes()[:-20])
    for pointer in sorted((run.folder / "ray").glob("step-*"))[:-1]:
        (pointer / "pointer.json").unlink()
        pointer.rmdir()


def test_controller_frozen_rank_damaged_snapshot_and_head_are_survived(reference, text, tmp_path):
    undisturbed, _ = reference
    run = driver.make_run(tmp_path, text)
    kill = '{kind = "kill_controller", step = 14, rank = 1}'
    slow = ", ".join(f'{{kind = "slow", step = {step}, seconds = 5}}' for step in (14, 26, 40))
    settings = driver.settings("faults.stall_s=10", f"faults.inject=[{kill}, {slow}]")
    process = driver.start("run", run.job, *settings)  # else it might end before it is disturbed

    driver.wait_until(driver.trains(run, 2, 25), process)
    frozen = run.events("training_started")[-1]["workers"][1]["pid"]
    os.kill(frozen, signal.SIGSTOP)
    _damage_what_ray_remembers(run, process)

    driver.wait_until(driver.trains(run, 3, 38), process)
    (head,) = driver.family(process, "gcs_server")
    head.kill()

    code, output = driver.finish(process)
    assert code == 0, output
    causes = [event["cause"] for event in run.events("restarted")]
    assert "controller) died" in causes[0]
    assert f"Stuck: rank 1 (process {frozen} on " in causes[1]
    assert "frozen; 1 waited" in causes[1]
    assert "head of the local Ray is gone" in causes[2]
    assert all(event["is_loss"] for event in run.events("restarted"))
    assert "in _forward_backward" in (run.folder / "stacks/attempt-2-rank-00000.txt").read_text()
    assert list((run.folder / "ray").glob("checkpoint_manager_snapshot.json.damaged-*"))
    assert run.results() == undisturbed.results()
    assert all(not replay["replay"] for replay in run.replays())


def test_a_killed_driver_is_followed_by_another_and_what_lives_on_of_it_commits_nothing(
    reference, text, tmp_path
):
    """Its process that would end the cluster is frozen with a worker, until there is another."""
    undisturbed, _ = reference
    run = driver.make_run(tmp_path, text)
    patient = driver.settings("faults.stall_s=900", "faults.timeout_s=1200")
    process = driver.start("run", run.job, *patient, RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S="900")
    driver.wait_until(driver.trains(run, 1, 15), process)
    family = psutil.Process(process.pid).children(recursive=True)
    (connected,) = driver.family(process, "dmuon_platform.ray_process")
    logs = Path(connected.cmdline()[-1])
    worker = psutil.Process(run.events("training_started")[0]["workers"][1]["pid"])
    with driver.suspended(connected), driver.suspended(worker):
        process.kill()
        second = driver.start("run", run.job)
        driver.wait_until(lambda: len(run.events("training_started")) == 2, second)
        worker.resume()
        code, output = driver.finish(second)
        assert code == 0, output
        driver.wait_until(lambda: _say("attempt 2 has taken the run over", logs))
    taken_over = run.events("training_started")[1]["time"]
    saved_late = [e for e in run.events("checkpoint_saved") if e["time"] > taken_over]
    assert {event["attempt"] for event in saved_late} == {2}
    assert run.results() == undisturbed.results()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


def _say(words, logs):
    """Whether Ray has written down some words."""
    return any(words in file.read_text(errors="replace") for file in logs.rglob("*.log"))
