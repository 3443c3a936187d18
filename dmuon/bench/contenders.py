"""The two contenders: one model each, equal at the start, wrapped and optimised their own way."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon
from dmuon.bench import decoder
from dmuon.bench.settings import Settings

ADAMW, DMUON = "adamw", "dmuon"
_ADAMW_LR = 1e-3
_MUON_LR = 0.005  # no warm-up here; 0.2 of it is the RMS of an update, as AdamW's at 1e-3


@dataclass
class Contender:
    """A model in training.

    Attributes:
        name: ``ADAMW`` or ``DMUON``.
        losses: of this rank's rows, one a step taken.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[torch.Tensor] = field(default_factory=list)


def make_adamw(settings: Settings, mesh: DeviceMesh, device: torch.device) -> Contender:
    """``fully_shard`` and stock ``torch.optim.AdamW``. Collective over ``mesh``."""
    model = _shard(decoder.build(settings).to(device), settings, mesh)
    return Contender(ADAMW, model, torch.optim.AdamW(model.parameters(), lr=_ADAMW_LR))


def make_dmuon(settings: Settings, mesh: DeviceMesh, device: torch.device) -> Contender:
    """The same with owners for the hidden matrices and ``dmuon.Muon``. Collective over ``mesh``."""
    model = decoder.build(settings).to(device)
    dmuon.dedicate_params(
        model, mesh, reshard_after_forward=settings.reshard, mp_policy=_policy(settings)
    )
    model = _shard(model, settings, mesh)
    return Contender(DMUON, model, dmuon.Muon(model, lr=_MUON_LR, adamw_lr=_ADAMW_LR))


MAKERS: tuple[Callable[[Settings, DeviceMesh, torch.device], Contender], ...] = (
    make_adamw,
    make_dmuon,
)


def wire_dtype(settings: Settings) -> torch.dtype:
    """The dtype weights travel and compute in."""
    return torch.bfloat16 if settings.precision == "bfloat16" else torch.float32


def _shard(model: decoder.Decoder, settings: Settings, mesh: DeviceMesh) -> decoder.Decoder:
    policy = _policy(settings)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=settings.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _policy(settings: Settings) -> MixedPrecisionPolicy:
    if settings.precision == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=wire_dtype(settings), reduce_dtype=torch.float32)
