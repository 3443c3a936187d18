"""What users do with gradients between backward and step: accumulate, measure, clip."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dmuon import dedication as dedications
from dmuon import wrapping
from dmuon.agreement import gather_objects
from dmuon.call_order import Call
from dmuon.dedication import Dedication
from dmuon.errors import NonFiniteGradientError, SetupError
from dmuon.flags import check_flags
from dmuon.names import original_name
from dmuon.optimizer import Muon


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients locally; the first backward outside sends the sum. May be nested.

    Every rank keeps whole gradients meanwhile, as with FSDP2's ``set_requires_gradient_sync``.
    """
    engine = dedications.of(model).engine
    before = engine.sync_gradients
    wrapping.set_gradient_sync(model, engine, False)
    try:
        yield
    finally:
        wrapping.set_gradient_sync(model, engine, before)


def wait_all_replicate_broadcasts(model: nn.Module) -> None:
    """Wait until the weights of the last step have arrived on this rank; nothing to do on 1D."""
    dedications.of(model).engine.settle_weights()


@torch.no_grad()
def clip_grad_norm_(
    model_or_optimizer: nn.Module | Muon,
    max_norm: float,
    eps: float = 1e-6,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients so that their global 2-norm is at most ``max_norm``.

    Collective over the mesh. The norm is that of one process with the whole batch: every
    dedicated matrix counts once, on its owner, every symmetric shard once a replica. As
    ``torch.nn.utils.clip_grad_norm_`` the factor is ``max_norm / (norm + eps)``, at most 1.

    Args:
        model_or_optimizer: the model given to ``dedicate_params``, or its ``dmuon.Muon``.
        max_norm: at least 0; infinity measures and leaves the gradients as they are.
        eps: added to the norm that is divided by.
        error_if_nonfinite: look at the norm on the host, which waits for the device, and raise
            when it is NaN or infinite. Otherwise gradients take on the NaN, as in torch.

    Returns:
        The norm before clipping, 0-dim float32 on the device, equal on every rank.

    Raises:
        NonFiniteGradientError: on every rank, naming the parameters; gradients stay as they are.
    """
    check_flags(error_if_nonfinite=error_if_nonfinite)
    dedication = _dedication_of(model_or_optimizer)
    if not isinstance(max_norm, int | float | torch.Tensor) or not max_norm >= 0:
        raise ValueError(f"max_norm must be a number of at least 0, got {max_norm!r}")
    engine = dedication.engine
    engine.settle_gradients()
    engine.order.note_settings(max_norm if isinstance(max_norm, int | float) else None)
    engine.order.begin(Call.CLIP_GRAD_NORM)
    engine.scaling_watch.look()
    owned = list(engine.ledger.named_grads().values())
    symmetric = list(_symmetric_grads(dedication).values())
    total = _squares(owned, dedication.device)
    total += _squares(symmetric, dedication.device) / dedication.owner_map.num_replicas
    if dedication.owner_map.num_owners > 1:
        engine.counters.count("all_reduce", total.nbytes)
        with engine.order.explained("adding up the norms of all ranks"):
            dist.all_reduce(total, group=dedication.owner_map.everyone)
    norm = total.sqrt()
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise NonFiniteGradientError(nonfinite_gradients(model_or_optimizer))
    if max_norm != float("inf"):
        factor = torch.clamp(max_norm / (norm + eps), max=1.0)
        for grad in [*owned, *symmetric]:
            grad.mul_(factor.to(grad.dtype))
        engine.scaling_watch.note()
    engine.scaling_watch.tell()
    return norm


@torch.no_grad()
def nonfinite_gradients(model_or_optimizer: nn.Module | Muon) -> list[str]:
    """Names of the parameters whose gradients hold NaN or infinity, in the order of the model.

    Collective over the mesh, and equal on every rank; it waits for the device, so it is for
    finding a cause and not for every step.
    """
    dedication = _dedication_of(model_or_optimizer)
    engine = dedication.engine
    engine.settle_gradients()
    engine.order.begin_and_check(Call.NONFINITE_GRADIENTS)
    grads = {**engine.ledger.named_grads(), **_symmetric_grads(dedication)}
    mine = [name for name, grad in grads.items() if not bool(grad.isfinite().all())]
    found = {name for names in gather_objects(dedication, mine) for name in names}
    names = [original_name(name) for name, _ in dedication.model.named_parameters()]
    return [name for name in names if name in found]


def _dedication_of(model_or_optimizer: nn.Module | Muon) -> Dedication:
    if isinstance(model_or_optimizer, Muon):
        return model_or_optimizer.dedication
    if not isinstance(model_or_optimizer, nn.Module):
        raise SetupError(
            "gradients are found by the model or its dmuon.Muon, for parameters lack those of "
            f"hidden matrices; got {type(model_or_optimizer).__name__}: give the model"
        )
    return dedications.of(model_or_optimizer)


def _symmetric_grads(dedication: Dedication) -> dict[str, torch.Tensor]:
    """What this rank holds of the gradients of symmetric parameters, by name."""
    dedication.reshard_symmetric()
    grads = {
        original_name(name): param.grad
        for name, param in dedication.model.named_parameters()
        if param.grad is not None
    }
    return {n: grad.to_local() if isinstance(grad, DTensor) else grad for n, grad in grads.items()}


def _squares(grads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float32, device=device)
    for grad in grads:
        real = torch.view_as_real(grad) if grad.is_complex() else grad
        total += real.float().square().sum()
    return total
