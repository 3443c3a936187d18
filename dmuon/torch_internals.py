"""The private corners of torch this package stands on, all in one file (torch 2.11 to 2.13)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule

P = ParamSpec("P")
R = TypeVar("R")


# called all_gather_into_tensor and reduce_scatter_tensor before torch 2.13
all_gather: Callable[..., dist.Work] = getattr(dist, "all_gather_single", None) or (
    dist.all_gather_into_tensor
)
reduce_scatter: Callable[..., dist.Work] = getattr(dist, "reduce_scatter_single", None) or (
    dist.reduce_scatter_tensor
)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """What carries the collectives of ``group`` on ``device``: "nccl", "gloo", ..."""
    return str(group._get_backend(device).name())


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def backward_id() -> int:
    """Number of the backward that runs on this thread, -1 for none.

    Reentrant activation checkpointing runs a backward of its own inside another one.
    """
    return torch._C._current_graph_task_id()


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` once when the running backward is over; callable from its hooks only."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def will_reach(leaf: torch.Tensor) -> bool:
    """Whether the running backward will leave a gradient in ``leaf``; callable from its hooks only.

    One that reentrant checkpointing runs inside it is not looked into.
    """
    if not leaf.requires_grad:
        return False
    return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)


def hook_leaf(leaf: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call ``hook`` once a backward when ``leaf`` has its gradient, also if it is frozen now."""
    requires_grad = leaf.requires_grad
    leaf.requires_grad_(True)
    leaf.register_post_accumulate_grad_hook(hook)
    leaf.requires_grad_(requires_grad)


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """From now on collectives over a gloo group may take so long. Local."""
    distributed_c10d._set_pg_timeout(timeout, group)


def compute_dtype_of(module: FSDPModule) -> torch.dtype | None:
    """The ``param_dtype`` that ``fully_shard`` was given for ``module``; None also if unknown."""
    policy = getattr(module._get_fsdp_state(), "_mp_policy", None)
    return getattr(policy, "param_dtype", None)


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Make ordinary tensors, which training can use later, also under ``inference_mode``."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def not_compiled(hook: Callable[P, R]) -> Callable[P, R]:
    """``hook``, kept out of ``torch.compile`` graphs: it communicates and swaps storage."""
    disabled: Callable[P, R] = torch.compiler.disable(hook, recursive=True)
    return disabled
