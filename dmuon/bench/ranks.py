"""Starting ranks on this machine; the error of one comes to the caller, with its traceback."""

import os
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

T = TypeVar("T")

_ENVIRONMENT = {  # of the ranks, where the user has not chosen
    # Threads sleep while they wait for each other. Where other programs want the same cores,
    # threads that spin at every barrier of a small matrix product make a step five to ten times
    # slower (measured on 2 cores with a load of 10).
    "OMP_WAIT_POLICY": "passive",
    "KINETO_LOG_LEVEL": "99",  # torch's profiler, which counts memory, else writes to the terminal
}
_GRACE_S = 2.0  # how long the other ranks may still report once one has failed
_PRELOAD = ["torch._dynamo", "torch.distributed.fsdp", "dmuon.bench.measure"]


class RankError(RuntimeError):
    """A rank failed; the message is its traceback."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """How a rank ended: with a value, or at a moment with a traceback."""

    value: T | None = None
    failed_at: float | None = None
    traceback: str = ""


@dataclass(frozen=True)
class Launch:
    """How the ranks are to meet.

    Attributes:
        num_ranks: how many.
        device_type: "cpu" (gloo on the loopback interface) or "cuda" (NCCL, one GPU a rank).
        num_threads: of each rank.
        timeout_s: of every collective.
    """

    num_ranks: int
    device_type: str
    num_threads: int
    timeout_s: int


def run_ranks(launch: Launch, body: Callable[..., T], *args: Any) -> list[T]:
    """Call ``body(rank, *args)`` once on each rank and return what they returned, in order.

    ``body`` must be importable. Processes come from a fork server that has imported torch once
    and never touched a GPU or started a thread pool.

    Raises:
        RankError: with the traceback of the rank that failed first.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    outcomes: dict[int, Outcome[T]] = {}
    pending: dict[Connection, int] = {}
    processes = []
    with tempfile.TemporaryDirectory() as folder, _environment_of_ranks():
        try:
            for rank in range(launch.num_ranks):
                reader, writer = context.Pipe(duplex=False)
                target = (rank, launch, str(Path(folder) / "store"), writer, body, args)
                process = context.Process(target=_rank, args=target, daemon=True)
                process.start()
                writer.close()  # so that the death of this rank reads as an end of file
                pending[reader] = rank
                processes.append(process)
            _collect(pending, outcomes)
        finally:
            for process in processes:  # they have reported; gloo's teardown may abort or wait
                process.kill()
                process.join()
    return _values(outcomes)


@contextmanager
def _environment_of_ranks() -> Iterator[None]:
    """Libraries read it when the fork server loads them."""
    ours = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def rank_device(device_type: str, rank: int) -> torch.device:
    """The device of one rank of this machine."""
    return torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)


def _collect(pending: dict[Connection, int], outcomes: dict[int, Outcome[T]]) -> None:
    """Until all have reported; collectives time out, so a stuck rank fails its peers."""
    has_failed = False
    while pending:
        ready = wait(list(pending), _GRACE_S if has_failed else None)
        if not ready:
            return
        for reader in [each for each in pending if each in ready]:
            rank = pending.pop(reader)
            outcomes[rank] = _read(reader)
            has_failed |= outcomes[rank].failed_at is not None


def _read(reader: Connection) -> Outcome[Any]:
    try:
        outcome: Outcome[Any] = reader.recv()
    except EOFError:  # the cause, whenever its peers noticed: hence moment 0
        return Outcome(failed_at=0.0, traceback="it died without a traceback (killed, or crashed)")
    return outcome


def _values(outcomes: dict[int, Outcome[T]]) -> list[T]:
    failures = [
        (o.failed_at, r, o.traceback) for r, o in outcomes.items() if o.failed_at is not None
    ]
    if failures:
        _, rank, text = min(failures)
        raise RankError(f"rank {rank} failed first:\n{text}")
    return [outcomes[rank].value for rank in sorted(outcomes)]  # type: ignore[misc]


def _rank(
    rank: int,
    launch: Launch,
    store: str,
    report: Connection,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    threading.Thread(target=_die_with_caller, daemon=True).start()
    try:
        _join(rank, launch, store)
        value = body(rank, *args)
        dist.barrier()
        report.send(Outcome(value))
    except BaseException:
        report.send(Outcome(failed_at=time.monotonic(), traceback=traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(rank: int, launch: Launch, store: str) -> None:
    """Make the process group of this run. Collective over its ranks."""
    torch.set_num_threads(launch.num_threads)
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
    device = rank_device(launch.device_type, rank)
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=launch.num_ranks,
        timeout=timedelta(seconds=launch.timeout_s),
        device_id=None if device.type == "cpu" else device,
    )


def _die_with_caller() -> None:
    caller = parent_process()
    assert caller is not None
    caller.join()
    os._exit(1)


def num_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
