"""What is lost in a run comes back: controller, frozen rank, damaged records, head, driver."""

import os
import signal

import psutil
import pytest
from cluster import driver

pytestmark = pytest.mark.cluster


def _family(process, name):
    """The processes below ``process`` whose command line says ``name``."""
    found = []
    for each in psutil.Process(process.pid).children(recursive=True):
        try:
            if name in " ".join(each.cmdline()):
                found.append(each)
        except psutil.Error:
            continue  # it has ended meanwhile
    return found


def _trains(run, attempts, step):
    """Whether the newest of so many attempts has come to a step."""

    def condition():
        started = run.events("training_started")
        return len(started) == attempts and max(run.metrics(), default=0) >= step

    return condition


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
    slow = ", ".join(f'{{kind = "slow", step = {step}, seconds = 5}}' for step in (14, 26, 40))
    settings = ("--set", "faults.stall_s=10", "--set", f"faults.inject=[{slow}]")
    process = driver.start("run", run.job, *settings)  # else it might end before it is disturbed
    driver.wait_until(_trains(run, 1, 13), process)
    (controller,) = _family(process, "ray::TrainController")
    controller.kill()

    driver.wait_until(_trains(run, 2, 25), process)
    frozen = run.events("training_started")[-1]["workers"][1]["pid"]
    os.kill(frozen, signal.SIGSTOP)
    _damage_what_ray_remembers(run, process)

    driver.wait_until(_trains(run, 3, 38), process)
    (head,) = _family(process, "gcs_server")
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


def test_a_killed_driver_leaves_nothing_behind_and_the_next_one_goes_on(reference, text, tmp_path):
    undisturbed, _ = reference
    run = driver.make_run(tmp_path, text)
    process = driver.start("run", run.job)
    driver.wait_until(_trains(run, 1, 25), process)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    code, output = driver.run("run", run.job)
    assert code == 0, output
    assert run.events("training_started")[-1]["step"] >= 20
    assert run.results() == undisturbed.results()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
