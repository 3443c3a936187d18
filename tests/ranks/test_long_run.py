"""A long run takes no more of anything at its end than near its start."""

import gc
import threading

import psutil
import torch
import torch.distributed as dist
from narrow import inputs, narrow_loss, prepare_narrow
from ranks_runner import run_ranks
from torch import nn
from wrapped import make_mesh

import dmuon

NUM_STEPS, WARM = 500, 100

# Of one rank from step 100 to step 500. The arenas of malloc (22 threads) settle meanwhile: 3 to
# 11 MiB measured, and next to nothing afterwards. A matrix kept a step is 400 * 64 KiB = 25 MiB.
RSS_ALLOWANCE = 16 << 20
OBJECT_ALLOWANCE = 20  # caches of python and torch that fill late


def train_step(model: nn.Module, optimizer: dmuon.Muon, x: torch.Tensor) -> None:
    with dmuon.no_sync(model):
        narrow_loss(model, x).backward()
    narrow_loss(model, x).backward()
    dmuon.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def hooks_of(model: nn.Module) -> int:
    """On modules, and on leaves."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    total = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
    for param in model.parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            total += len(getattr(param, kind) or ())
    return total


def used(model: nn.Module) -> dict[str, int]:
    """What this process holds at this moment."""
    process = psutil.Process()
    gc.collect()
    return {
        "resident bytes": process.memory_info().rss,
        "python objects": len(gc.get_objects()),
        "process groups": len(dist.distributed_c10d._world.pg_map),
        "threads": process.num_threads(),
        "python threads": threading.active_count(),
        "file descriptors": process.num_fds(),
        "hooks": hooks_of(model),
    }


def test_500_steps_leave_nothing_behind() -> None:
    """With accumulation, clipping and asynchronous publishing to a replica."""
    allowance = {"resident bytes": RSS_ALLOWANCE, "python objects": OBJECT_ALLOWANCE}

    def body(rank: int) -> None:
        model = prepare_narrow(make_mesh(2, 1))
        optimizer = dmuon.Muon(model, lr=1e-3, ns_steps=1)
        before: dict[str, int] = {}
        for step in range(NUM_STEPS):
            if step == WARM:
                before = used(model)
            train_step(model, optimizer, inputs(rank))
        for kind, count in used(model).items():
            grown = count - before[kind]
            assert grown <= allowance.get(kind, 0), f"{kind}: {before[kind]} and {grown} more"

    run_ranks(2, body)
