"""Machines come and go: a run on several raylets of this machine, killed and added for real."""

from contextlib import AbstractContextManager

import psutil
import pytest
import torch
from cluster import driver
from cluster.machines import Machines
from safetensors.torch import load_file

pytestmark = pytest.mark.cluster


@pytest.fixture
def machines():
    machines = Machines()
    yield machines
    machines.close()


@pytest.fixture
def autoscaled():
    machines = Machines(autoscales=True)
    yield machines
    machines.close()


def _weights(run: driver.Run) -> dict[str, torch.Tensor]:
    (newest,) = sorted((run.folder / "checkpoints").glob("step-*"))[-1:]
    files = newest.glob("model-*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def frozen(run: driver.Run) -> AbstractContextManager[None]:
    """Freeze a worker, so that the run waits where it is until something has happened."""
    worker = run.events("training_started")[-1]["workers"][-1]["pid"]
    return driver.suspended(psutil.Process(worker))


def started(run, machines, setting):
    """The job on the cluster, by a command that notices soon when the cluster is gone."""
    return driver.start(
        *("run", run.job, "--address", machines.address, "--set", setting),
        RAY_AUTH_MODE="disabled",
        RAY_gcs_rpc_server_reconnect_timeout_s="5",
    )


def test_a_machine_is_lost_and_another_added(machines, text, tmp_path):
    # Rates at which a difference in the last bit does not grow much within the run.
    rates = ["optimizer.lr=0.004", "optimizer.adamw_lr=0.002"]
    settings = ["--set", "optimizer.ns_dtype=float32", *rates]
    first, _ = machines.add(), machines.add()
    run = driver.make_run(tmp_path / "elastic", text)
    elastic = ["resources.workers={min=2, max=4}", "faults.grow_after_s=1"]
    process = driver.start(
        *("run", run.job, "--address", machines.address, *settings, *elastic),
        RAY_AUTH_MODE="disabled",
    )
    driver.wait_until(lambda: max(run.metrics(), default=0) >= 13, process)
    machines.lose(first)
    driver.wait_until(lambda: len(run.events("training_started")) == 2, process)
    with frozen(run):
        machines.add()
        driver.wait_until((run.folder / "stop.json").exists, process)
    code, output = driver.finish(process)
    assert code == 0, output
    started = run.events("training_started")
    assert [len(event["workers"]) for event in started] == [4, 2, 4]
    assert [event["is_loss"] for event in run.events("restarted")] == [True]
    (grown,) = run.events("stopped")
    assert (grown["after"], grown["reason"]) == ("restart", "there is room for more workers")
    assert grown["step"] == grown["checkpoint"] == started[2]["step"]

    undisturbed = driver.make_run(tmp_path / "undisturbed", text)
    code, output = driver.run("run", undisturbed.job, *settings)
    assert code == 0, output
    metrics = run.metrics()
    for step, expected in undisturbed.metrics().items():
        assert metrics[step]["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-4)
    others = _weights(undisturbed)
    for name, tensor in _weights(run).items():
        torch.testing.assert_close(tensor, others[name], atol=1e-4, rtol=1e-4, msg=name)


def test_an_autoscaler_is_asked_for_room_and_a_machine_that_is_drained_is_left_with_a_checkpoint(
    autoscaled, reference, text, tmp_path
):
    machines = autoscaled
    undisturbed, _ = reference
    run = driver.make_run(tmp_path, text)
    process = driver.start(
        *("run", run.job, "--address", machines.address), RAY_AUTH_MODE="disabled"
    )
    line = ""
    while "waiting for room" not in line:
        line = process.stdout.readline()
        assert line, "ended without waiting"
    assert "2 workers need 2 CPUs, and 0 CPUs" in line
    driver.wait_until(lambda: max(run.metrics(), default=0) >= 3, process)
    with frozen(run):
        machines.drain(machines.node_with_room())
        driver.wait_until((run.folder / "stop.json").exists, process)
    driver.wait_until(lambda: run.events("stopped"), process)
    machines.add()
    code, output = driver.finish(process)
    assert code == 0, output
    (stopped,) = run.events("stopped")
    assert (stopped["after"], stopped["checkpoint"]) == ("restart", stopped["step"])
    assert [event["step"] for event in run.events("training_started")] == [0, stopped["step"]]
    assert not run.events("restarted")
    assert run.results() == undisturbed.results()


def test_a_frozen_controller_and_a_head_that_comes_back_are_survived(
    machines, reference, text, tmp_path
):
    undisturbed, _ = reference
    run = driver.make_run(tmp_path, text)
    machines.add()
    process = started(run, machines, "faults.stall_s=15")
    driver.wait_until(driver.trains(run, 1, 13), process)
    machines.freeze_controller()
    driver.wait_until(driver.trains(run, 2, 13), process)
    with frozen(run):
        machines.lose_all()
        machines.start_head()
        machines.add()
        driver.wait_until(lambda: len(run.events("restarted")) >= 2, process)
    code, output = driver.finish(process)
    assert code == 0, output
    controller, *_ = lost = run.events("restarted")
    assert "(Ray's controller) has not been heard of for" in controller["cause"]
    assert all(event["is_loss"] for event in lost), "whatever of the cluster is missed first"
    assert run.results() == undisturbed.results()
    assert all(not replay["replay"] for replay in run.replays())


def test_a_cluster_that_is_gone_ends_the_run_with_75_and_on_another_it_goes_on(
    machines, reference, text, tmp_path
):
    undisturbed, _ = reference
    run = driver.make_run(tmp_path, text)
    machines.add()
    process = started(run, machines, "faults.node_wait_s=4")
    driver.wait_until(lambda: max(run.metrics(), default=0) >= 13, process)
    machines.close()
    code, output = driver.finish(process)
    assert code == 75, output
    assert "The cluster is gone" in output
    assert "faults.node_wait_s = 4" in output
    assert run.events("restarted")[-1]["is_loss"]
    assert driver.tracked_status(run) == "KILLED"

    code, output = driver.run("run", run.job)
    assert code == 0, output
    assert run.events("training_started")[-1]["step"] >= 10
    assert run.results() == undisturbed.results()
    assert driver.tracked_status(run) == "FINISHED"
