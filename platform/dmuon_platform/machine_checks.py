"""This machine: packages, processors, memory, and what the system lets a process do."""

import os
import platform
import resource
import socket
from collections.abc import Iterator
from importlib import metadata

import psutil
import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from dmuon_platform.finding import Finding, State

FEWEST_OPEN_FILES = 4096
"""Ray's processes hold some hundreds each; below this a larger cluster fails at random."""

SHOWN = ("torch", "ray", "mlflow", "transformers")


def check_machine() -> Iterator[Finding]:
    """Yield what is installed, which devices and backends there are, and the system's limits."""
    yield _packages()
    yield _processors()
    yield _gpus()
    yield _backend()
    yield _host_name()
    yield _open_files()


def _packages() -> Finding:
    versions = f"Python {platform.python_version()}"
    for name in SHOWN:
        if (version := _version(name)) is not None:
            versions += f", {name} {version}"
    problems = list(_unmet(metadata.requires("dmuon") or []))
    if problems:
        fix = "pip install -c constraints.txt -e . in the checkout, which has tested versions"
        return Finding("packages", State.BROKEN, f"{'; '.join(problems)} ({versions})", fix)
    return Finding("packages", State.GOOD, versions)


def _unmet(requirements: list[str]) -> Iterator[str]:
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None:
            yield f"{requirement.name} is missing"
        elif not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} {version} is not {requirement.specifier}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processors() -> Finding:
    cores, memory = _num_cores(), psutil.virtual_memory()
    seen = f"{cores} cores, {memory.available / 2**30:.0f} of {memory.total / 2**30:.0f} GiB free"
    if memory.available < 2 * 2**30:
        fix = "end other programs: Ray and two small workers take some 2 GiB"
        return Finding("processors", State.POOR, seen, fix)
    return Finding("processors", State.GOOD, seen)


def _num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpus() -> Finding:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
        kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        return Finding("GPUs", State.GOOD, f"{kinds} (CUDA {torch.version.cuda})")
    if os.path.exists("/proc/driver/nvidia/version"):
        fix = (
            "this torch cannot use the GPUs of this machine: install a CUDA build that the driver "
            "supports (the selector on pytorch.org), and look whether CUDA_VISIBLE_DEVICES hides "
            "them"
        )
        return Finding("GPUs", State.BROKEN, f"a driver, and torch {torch.__version__}", fix)
    return Finding("GPUs", State.GOOD, "none; workers use the CPU")


def _backend() -> Finding:
    if torch.cuda.is_available():
        if dist.is_nccl_available():
            version = ".".join(map(str, torch.cuda.nccl.version()))
            return Finding("backend", State.GOOD, f"NCCL {version}")
        fix = "install the CUDA build of torch for Linux, which brings NCCL"
        return Finding("backend", State.BROKEN, "GPUs, and no NCCL", fix)
    if dist.is_gloo_available():
        return Finding("backend", State.GOOD, "gloo")
    fix = "install a build of torch with torch.distributed"
    return Finding("backend", State.BROKEN, "no gloo", fix)


def _host_name() -> Finding:
    """Workers of several machines meet under it."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        fix = f"add a line for {name} to /etc/hosts: workers meet under this name"
        return Finding("host name", State.BROKEN, f"{name} has no address ({error})", fix)
    return Finding("host name", State.GOOD, f"{name} is {address}")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FEWEST_OPEN_FILES:
        fix = f"ulimit -n {max(FEWEST_OPEN_FILES, min(hard, 65536))} before the command"
        return Finding("open files", State.POOR, f"at most {soft} a process", fix)
    return Finding("open files", State.GOOD, f"at most {soft} a process")
