"""The services of ``docker/compose.yaml`` without containers: its own commands, as processes.

Hosts become 127.0.0.1, ports free ones, volumes folders of the test's. Nothing else of a command, a
health check or an environment is changed, but for what tells raylets on one machine apart.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import tries
import yaml

REPOSITORY = Path(__file__).parents[1]
COMPOSE = REPOSITORY / "docker" / "compose.yaml"
BIN = Path(sys.executable).parent
needs_programs = pytest.mark.skipif(
    not all((BIN / name).exists() for name in ("hadolint", "docker-compose")),
    reason="hadolint and docker-compose come with the dev extra on Linux on x86-64",
)
PORTS = ("6379", "8265", "5000", "5432")
AGENT_PORT = "52365"
"""Of a raylet's agent, which answers its health check: one a machine, so one a service here."""
HEALTHY_S = 120.0
ENDED_S = 10.0

SECRETS = {"RAY_AUTH_TOKEN": "5e" * 32, "POSTGRES_PASSWORD": "of-this-test"}


def resolved(**environment: str) -> dict[str, Any]:
    """Return the file as Docker Compose understands it; raises what that says against it."""
    command = ["docker-compose", "-f", COMPOSE, "--profile", "*", "config", "--format", "json"]
    done = subprocess.run(
        [BIN / command[0], *command[1:]],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ValueError(done.stderr)
    return json.loads(done.stdout)


class Services:
    """Starts services one by one, and ends all of them.

    Args:
        folder: For sockets, volumes and logs: a short path that every user can enter.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._services = resolved(**SECRETS)["services"]
        self._ports = {port: str(_free_port()) for port in PORTS}
        self._agents = {name: str(_free_port()) for name in self._services}
        self.changes: dict[str, str] = {}
        """To every service's environment: what this machine has instead."""
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("storage", "artifacts", "home"):
            (folder / name).mkdir()

    def __enter__(self) -> "Services":
        return self

    def __exit__(self, *_error: object) -> None:
        _end(list(self._processes.values()))

    def port(self, port: int) -> int:
        """Return the port that stands for one of the file."""
        return int(self._ports[str(port)])

    def environment(self, service: str) -> dict[str, str]:
        """Return what a service finds in its environment, and nothing of this process's."""
        own = self._services[service].get("environment") or {}
        return {
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.folder / "home"),
            "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/platform",  # what the image has installed
            "PGHOST": "127.0.0.1",
            "PGPORT": self._ports["5432"],
            **{key: self._native(service, value) for key, value in own.items()},
            **self.changes,
        }

    def command(self, service: str) -> list[str]:
        """Return the command of a service."""
        words = [self._native(service, word) for word in self._services[service]["command"]]
        if words[:2] == ["ray", "start"]:
            words.append("--node-ip-address=127.0.0.1")
            words.append(f"--dashboard-agent-listen-port={self._agents[service]}")
            # A folder each, as in containers: one raylet deletes what another still runs in.
            words.append(f"--temp-dir={self.folder}/{service}")
        return words

    def start(self, service: str, command: list[str] | None = None, **options: Any) -> None:
        """Start a service and wait until its health check passes.

        Args:
            service: Its name.
            command: For one whose command is in its image.
            options: Of the process.
        """
        tries.persist(lambda: self._try_to_start(service, command, options))

    def _try_to_start(
        self, service: str, command: list[str] | None, options: dict[str, Any]
    ) -> None:
        with (self.folder / f"{service}.log").open("wb") as log:
            process = self._processes[service] = subprocess.Popen(
                command or self.command(service),
                env=self.environment(service),
                cwd=self.folder,
                stdout=log,
                stderr=log,
                **options,
            )
        check = self._services[service]["healthcheck"]["test"][1:]
        words = [self._native(service, word) for word in check]
        deadline = time.monotonic() + HEALTHY_S
        while True:
            done = subprocess.run(words, env=self.environment(service), capture_output=True)
            if done.returncode == 0:
                return
            if process.poll() is not None or time.monotonic() > deadline:
                _end([process])
                log_text = (self.folder / f"{service}.log").read_text()
                raise RuntimeError(done.stderr.decode() + log_text)
            time.sleep(0.5)

    def run(self, service: str, *arguments: str) -> tuple[int, str]:
        """Run a service that ends, with more arguments; return its exit code and output."""
        return self._run(service, [*self.command(service), *arguments])

    def ray_job(self, spec: dict[str, Any], *arguments: str) -> tuple[int, str]:
        """Submit what a KubeRay job says, as its submitter does; return exit code and output."""
        words = [self._native("train", word) for word in shlex.split(spec["entrypoint"])]
        words = [word.replace("/opt/dmuon", str(REPOSITORY)) for word in words]
        runtime_env = yaml.safe_load(spec["runtimeEnvYAML"])
        command = ["ray", "job", "submit", f"--address=http://127.0.0.1:{self.port(8265)}"]
        command += ["--runtime-env-json", json.dumps(runtime_env)]
        command += ["--metadata-json", json.dumps(spec["metadata"])]
        return self._run("train", [*command, "--", *words, *arguments])

    def _run(self, service: str, command: list[str]) -> tuple[int, str]:
        done = subprocess.run(
            command,
            env=self.environment(service),
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        return done.returncode, done.stdout

    def _native(self, service: str, text: str) -> str:
        if not text.startswith("--allowed-hosts"):  # those are names that clients use
            text = re.sub(r"\b(head|mlflow|postgres)(?=:\d)", "127.0.0.1", text)
        for port, free in {**self._ports, AGENT_PORT: self._agents[service]}.items():
            text = re.sub(rf"\b{port}\b", free, text)
        text = re.sub(r"(?<==)/(storage|artifacts)$", rf"{self.folder}/\1", text)
        return text.replace("0.0.0.0", "127.0.0.1")


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    alive = [psutil.Process(each.pid) for each in processes if each.poll() is None]
    family = [*alive, *(child for one in alive for child in one.children(recursive=True))]
    for process in reversed(processes):
        process.terminate()
    for one in psutil.wait_procs(family, timeout=ENDED_S)[1]:
        one.kill()
    for process in processes:
        process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
