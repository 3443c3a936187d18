"""A Ray head on loopback alone, started and ended as the document says."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from cluster import driver
from printed import block

pytestmark = pytest.mark.cluster


def test_a_head_on_loopback_listens_nowhere_else_and_ends_with_its_command():
    command = block("platform/README.md", "on loopback alone", "bash")
    folder = tempfile.mkdtemp(prefix="dmuon-", dir="/tmp")  # Ray's sockets need short paths
    for ours, theirs in (("/tmp/ray-7479", folder), ("7479", _free_port()), ("8465", _free_port())):
        command = command.replace(ours, theirs)
    variable, ray, *arguments = shlex.split(command)
    more = ["--object-store-memory=100000000", f"--ray-client-server-port={_free_port()}"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= dict([variable.split("=")])
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "HOME": folder}
    try:
        head = subprocess.Popen(
            [Path(sys.executable).with_name(ray), *arguments, *more],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        driver.wait_until(lambda: driver.family(head, "raylet/raylet"), head)
        family = driver.family(head, "")
        driver.wait_until(lambda: len(_listening(driver.family(head, "raylet/raylet"))) > 1, head)
        addresses = {address.removeprefix("::ffff:") for address in _listening(family)}
        assert addresses == {"127.0.0.1"}
        head.terminate()
        output, _ = head.communicate(timeout=driver.PATIENCE_S)
        _, alive = psutil.wait_procs(family, timeout=driver.PATIENCE_S)
        assert not alive, output
    finally:
        for each in [*driver.family(head, ""), head]:
            each.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _listening(processes):
    found = [each.net_connections("inet") for each in processes if each.is_running()]
    return [one.laddr.ip for each in found for one in each if one.status == psutil.CONN_LISTEN]


def _free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])
