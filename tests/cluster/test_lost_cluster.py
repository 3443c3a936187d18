"""The cluster itself is lost, or what steers the workers there, and another takes its place."""

import pytest
from cluster import driver

pytestmark = pytest.mark.cluster


def started(run, machines, setting):
    """The job on the cluster, by a command that notices soon when the cluster is gone."""
    return driver.start(
        *("run", run.job, "--address", machines.address, "--set", setting),
        RAY_AUTH_MODE="disabled",
        RAY_gcs_rpc_server_reconnect_timeout_s="5",
    )


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
    with run.frozen():
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
