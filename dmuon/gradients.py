"""What users do with gradients between backward and step: accumulate, measure, clip."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dmuon import dedication as dedications
from dmuon.dedication import Dedication
from dmuon.optimizer import Muon


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients locally; the first backward outside sends the sum. May be nested.

    Every rank keeps whole gradients meanwhile, as with FSDP2's ``set_requires_gradient_sync``.
    """
    engine = dedications.of(model).engine
    before = engine.sync_gradients
    engine.sync_gradients = False
    _sync_symmetric(model, False)
    try:
        yield
    finally:
        engine.sync_gradients = before
        _sync_symmetric(model, before)


def wait_all_replicate_broadcasts(model: nn.Module) -> None:
    """Wait until the weights of the last step have arrived on this rank; nothing to do on 1D."""
    dedications.of(model).engine.settle_weights()


@torch.no_grad()
def clip_grad_norm_(
    model_or_optimizer: nn.Module | Muon, max_norm: float, eps: float = 1e-6
) -> torch.Tensor:
    """Scale all gradients so that their global 2-norm is at most ``max_norm``.

    Collective over the mesh. The norm is that of one process with the whole batch: every
    dedicated matrix counts once, on its owner, every symmetric shard once a replica. As
    ``torch.nn.utils.clip_grad_norm_`` the factor is ``max_norm / (norm + eps)``, at most 1.

    Returns:
        The norm before clipping, 0-dim float32 on the device, equal on every rank.
    """
    if isinstance(model_or_optimizer, Muon):
        dedication = model_or_optimizer.dedication
    else:
        dedication = dedications.of(model_or_optimizer)
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be at least 0, got {max_norm!r}")
    engine = dedication.engine
    engine.settle_gradients()
    owned, symmetric = engine.ledger.grads(), _symmetric_grads(dedication)
    total = _squares(owned, dedication.device)
    total += _squares(symmetric, dedication.device) / dedication.owner_map.num_replicas
    if dedication.owner_map.num_owners > 1:
        engine.counters.count("all_reduce", total.nbytes)
        dist.all_reduce(total, group=dedication.owner_map.everyone)
    norm = total.sqrt()
    factor = torch.clamp(max_norm / (norm + eps), max=1.0)
    for grad in [*owned, *symmetric]:
        grad.mul_(factor.to(grad.dtype))
    return norm


def _symmetric_grads(dedication: Dedication) -> list[torch.Tensor]:
    grads = [param.grad for param in dedication.model.parameters() if param.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


def _squares(grads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float32, device=device)
    for grad in grads:
        total += grad.float().square().sum()
    return total


def _sync_symmetric(model: nn.Module, requires_sync: bool) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(requires_sync, recurse=False)
