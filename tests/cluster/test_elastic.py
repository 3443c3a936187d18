"""Machines come and go: a run on several raylets of this machine, killed and added for real."""

import pytest
import torch
from cluster import driver
from cluster.machines import Machines
from dmuon_platform.spec import load_job
from safetensors.torch import load_file
from worker_runs import run_on_forked_ranks

pytestmark = pytest.mark.cluster


@pytest.fixture
def autoscaled():
    machines = Machines(autoscales=True)
    yield machines
    machines.close()


def _weights(run: driver.Run) -> dict[str, torch.Tensor]:
    (newest,) = sorted((run.folder / "checkpoints").glob("step-*"))[-1:]
    files = newest.glob("model-*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_a_machine_is_lost_and_another_added(machines, text, tmp_path):
    """Each has room for one worker. Compared with a training by two that no Ray knows of."""
    # Rates at which a difference in the last bit does not grow much within the run.
    settings = ["optimizer.lr=0.004", "optimizer.adamw_lr=0.002", "optimizer.ns_dtype=float32"]
    elastic = ["resources.workers={min=1, max=2}", "resources.cpus_per_worker=2"]
    first, _ = machines.add(), machines.add()
    run = driver.make_run(tmp_path, text)
    process = driver.start(
        *("run", run.job, "--address", machines.address),
        *driver.settings(*settings, *elastic, "faults.grow_after_s=1"),
        RAY_AUTH_MODE="disabled",
    )
    driver.wait_until(lambda: max(run.metrics(), default=0) >= 13, process)
    machines.lose(first)
    driver.wait_until(lambda: len(run.events("training_started")) == 2, process)
    with run.frozen():
        machines.add()
        driver.wait_until((run.folder / "stop.json").exists, process)
    code, output = driver.finish(process)
    assert code == 0, output
    started = run.events("training_started")
    assert [len(event["workers"]) for event in started] == [2, 1, 2]
    assert [event["is_loss"] for event in run.events("restarted")] == [True]
    (grown,) = run.events("stopped")
    assert (grown["after"], grown["reason"]) == ("restart", "there is room for more workers")
    assert grown["step"] == grown["checkpoint"] == started[2]["step"]

    (data,) = (run.folder.parent / "data").glob("*/")
    spec = load_job(run.job, ["name=undisturbed", *settings])
    run_on_forked_ranks(spec, data)
    undisturbed = driver.Run(run.job, spec.run_dir)
    metrics = run.metrics()
    assert sorted(metrics) == sorted(undisturbed.metrics()) == list(range(1, driver.STEPS + 1))
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
    with run.frozen():
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
