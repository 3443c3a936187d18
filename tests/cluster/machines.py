"""Machines of a cluster on this one: raylets that are started, lost, drained and asked for."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import tries
from cluster import driver

RAY = Path(sys.executable).with_name("ray")

NO_COMMANDS = (
    *("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands"),
    *("cluster_synced_files", "rsync_exclude", "rsync_filter"),
)
"""What Ray's autoscaler wants to be told and does not need for raylets of its own machine."""

HEAD_TYPE = "ray.head.default"
"""By any other name the autoscaler does not find the head, and starts one after the other."""


class Machines:
    """A Ray head without room for workers, and raylets that stand for machines.

    Args:
        autoscales: Whether Ray's autoscaler may add one machine when it is asked to.
    """

    def __init__(self, *, autoscales: bool = False) -> None:
        self.folder = tempfile.mkdtemp(prefix="dmuon-nodes-", dir="/tmp")
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self._env = env | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        self._env |= {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
        self._autoscales = autoscales
        self._processes: list[subprocess.Popen] = []
        self.address = f"127.0.0.1:{_free_port()}"
        more = self._autoscaler() if autoscales else []
        self.start_head(*more)

    def start_head(self, *more: str) -> None:
        """Start the head, again at the same address if there was one before."""
        port = self.address.rpartition(":")[2]
        self._start("--head", f"--port={port}", "--include-dashboard=false", *more, cpus=0)

    def _autoscaler(self) -> list[str]:
        """Write down what Ray's autoscaler may do; return what the head is told of it."""
        self._env |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        machine = {"CPU": 2, "object_store_memory": 80_000_000}
        settings = {key: [] for key in NO_COMMANDS} | {
            "cluster_name": "of-one-machine",
            "provider": {
                "type": "fake_multinode",
                "gcs_address": self.address,
                "disable_node_updaters": True,
            },
            "auth": {"ssh_user": "nobody"},
            "docker": {},
            "file_mounts": {},
            "file_mounts_sync_continuously": False,
            "max_workers": 1,
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": 60,
            "head_node_type": HEAD_TYPE,
            "available_node_types": {
                HEAD_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                "machine": {"resources": machine, "node_config": {}, "max_workers": 1},
            },
        }
        file = Path(self.folder) / "autoscaler.json"
        file.write_text(json.dumps(settings))
        return [f"--autoscaling-config={file}"]

    def add(self) -> subprocess.Popen:
        """Start a machine with room for two workers."""
        return self._start(f"--address={self.address}", cpus=2)

    def _start(self, *arguments: str, cpus: int) -> subprocess.Popen:
        return tries.persist(lambda: self._try_to_start(*arguments, cpus=cpus))

    def _try_to_start(self, *arguments: str, cpus: int) -> subprocess.Popen:
        there = self._all_processes()
        command = [RAY, "start", "--block", *arguments, f"--num-cpus={cpus}"]
        command += ["--node-ip-address=127.0.0.1", "--object-store-memory=80000000"]
        command += ["--include-log-monitor=false"]  # nobody reads what it sends
        if "--head" in arguments:
            command += [
                f"--temp-dir={self.folder}",
                *([] if self._autoscales else ["--no-monitor"]),
            ]
        process = subprocess.Popen(
            command,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        told = ""
        while "Ray runtime started" not in told:  # two at a time take each other's ports
            line = process.stdout.readline()
            told += line
            if not line:
                process.wait()
                _kill(self._all_processes() - there)  # what it started must not join later
                raise RuntimeError(f"a machine did not start:\n{told}")
        self._processes.append(process)
        return process

    def _all_processes(self) -> set[psutil.Process]:
        """Return all that Ray has started for any of the machines: they name the folder."""
        found = set()
        for one in psutil.process_iter():
            with suppress(psutil.Error):
                if any(self.folder in argument for argument in one.cmdline()):
                    found.add(one)
        return found

    @staticmethod
    def lose(process: subprocess.Popen) -> None:
        """Kill a machine's processes at once, as when its power fails."""
        machine = psutil.Process(process.pid)
        _kill({machine, *machine.children(recursive=True)})
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

    def freeze_controller(self) -> None:
        """Stop the process in which Ray steers the workers of a run."""
        (controller,) = {
            each
            for process in self._processes
            for each in driver.family(process, "ray::TrainController")
        }
        os.kill(controller.pid, signal.SIGSTOP)

    def lose_all(self) -> None:
        """Lose the head first, then the others: Ray starts no head where they look for one."""
        for process in self._processes:
            if process.poll() is None:
                self.lose(process)

    def close(self) -> None:
        """Lose all of them, for good."""
        self.lose_all()
        _kill(self._all_processes())
        shutil.rmtree(self.folder, ignore_errors=True)


def _kill(processes: set[psutil.Process]) -> None:
    for each in processes:
        with suppress(psutil.Error):
            each.kill()
    psutil.wait_procs(processes, timeout=10)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
