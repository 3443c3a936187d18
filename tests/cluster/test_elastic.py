"""Machines come and go: a run on several raylets of this machine, killed and added for real."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from cluster import driver
from safetensors.torch import load_file

pytestmark = pytest.mark.cluster

RAY = Path(sys.executable).with_name("ray")


class Machines:
    """A Ray head without room for workers, and raylets that stand for machines."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="dmuon-nodes-", dir="/tmp")
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self._env = env | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        self._processes: list[subprocess.Popen] = []
        self.address = f"127.0.0.1:{_free_port()}"
        port = self.address.rpartition(":")[2]
        self._start("--head", f"--port={port}", "--include-dashboard=false", cpus=0)

    def add(self) -> subprocess.Popen:
        """Start a machine with room for two workers."""
        return self._start(f"--address={self.address}", cpus=2)

    def _start(self, *arguments: str, cpus: int) -> subprocess.Popen:
        command = [RAY, "start", "--block", *arguments, f"--num-cpus={cpus}"]
        command += ["--node-ip-address=127.0.0.1", "--object-store-memory=80000000"]
        if "--head" in arguments:
            command += [f"--temp-dir={self.folder}"]
        process = subprocess.Popen(
            command,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        told = ""
        while "Ray runtime started" not in told:  # two at a time take each other's ports
            line = process.stdout.readline()
            told += line
            assert line, f"a machine did not start:\n{told}"
        return process

    @staticmethod
    def lose(process: subprocess.Popen) -> None:
        """Kill a machine's processes at once, as when its power fails."""
        family = [psutil.Process(process.pid)]
        family += family[0].children(recursive=True)
        for each in family:
            each.kill()
        psutil.wait_procs(family, timeout=10)
        process.communicate()

    def node_with_room(self) -> str:
        """Return Ray's name for the machine that has room for workers."""
        program = (
            f"import ray; ray.init('{self.address}', log_to_driver=False)\n"
            "print(*(n['NodeID'] for n in ray.nodes() if n['Resources'].get('CPU')))"
        )
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, check=True)
        return done.stdout.split()[-1]

    def drain(self, node: str) -> None:
        """Give a machine notice that it will be taken away in ten minutes."""
        command = [RAY, "drain-node", "--address", self.address, "--node-id", node]
        command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        command += ["--deadline-remaining-seconds", "600"]
        subprocess.run(command, env=self._env, check=True, capture_output=True)

    def close(self) -> None:
        for process in reversed(self._processes):
            if process.poll() is None:
                self.lose(process)
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def machines():
    machines = Machines()
    yield machines
    machines.close()


def _weights(run: driver.Run) -> dict[str, torch.Tensor]:
    (newest,) = sorted((run.folder / "checkpoints").glob("step-*"))[-1:]
    files = newest.glob("model-*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@contextmanager
def frozen(run: driver.Run) -> Iterator[None]:
    """Freeze a worker, so that the run waits where it is until something has happened."""
    pid = run.events("training_started")[-1]["workers"][-1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


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


def test_room_is_waited_for_and_a_machine_that_is_drained_is_left_with_a_checkpoint(
    machines, reference, text, tmp_path
):
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
    machines.add()
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


def test_a_cluster_that_is_gone_ends_the_run_with_75_and_on_another_it_goes_on(
    machines, reference, text, tmp_path
):
    undisturbed, _ = reference
    run = driver.make_run(tmp_path, text)
    machines.add()
    process = driver.start(
        *("run", run.job, "--address", machines.address, "--set", "faults.node_wait_s=4"),
        RAY_AUTH_MODE="disabled",
        RAY_gcs_rpc_server_reconnect_timeout_s="5",
    )
    driver.wait_until(lambda: max(run.metrics(), default=0) >= 13, process)
    machines.close()
    code, output = driver.finish(process)
    assert code == 75, output
    assert "The cluster is gone" in output
    assert "faults.node_wait_s = 4" in output
    assert run.events("restarted")[-1]["is_loss"]

    code, output = driver.run("run", run.job)
    assert code == 0, output
    assert run.events("training_started")[-1]["step"] >= 10
    assert run.results() == undisturbed.results()
