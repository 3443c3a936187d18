"""The contenders: one model each, equal at the start, wrapped and optimised their own way."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon
from dmuon.bench import decoder, public
from dmuon.bench.settings import (
    ADAMW,
    ALLTOALL,
    ALONE,
    DMUON,
    GATHER,
    MUON_FSDP2,
    PUBLIC,
    TORCH_MUON,
    Settings,
)
from dmuon.bench.sharded_muon import ExchangingMuon, GatheringMuon, ShardedMuon
from dmuon.newton_schulz import Coefficients, default_dtype

_ADAMW_LR = 1e-3
_MUON_LR = 0.005  # no warm-up here; 0.2 of it is the RMS of an update, as AdamW's at 1e-3


@dataclass
class Contender:
    """A model in training.

    Attributes:
        name: one of ``CONTENDERS``.
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
    optimizer = dmuon.Muon(
        model,
        lr=_MUON_LR,
        adamw_lr=_ADAMW_LR,
        ns_coefficients=_coefficients(settings),
        ns_dtype=newton_schulz_dtype(settings, device),
    )
    return Contender(DMUON, model, optimizer)


def make_alone(settings: Settings, device: torch.device) -> Contender:
    """A model of this rank's own, for what a step takes where nothing is sent. Local."""
    model = decoder.build(settings).to(device, wire_dtype(settings))
    return Contender(ALONE, model, torch.optim.AdamW(model.parameters(), lr=_ADAMW_LR))


def make(name: str, settings: Settings, mesh: DeviceMesh, device: torch.device) -> Contender:
    """The contender called ``name``. Collective over ``mesh``."""
    if name == ALONE:
        return make_alone(settings, device)
    if name in _BESIDE:
        return _BESIDE[name](settings, mesh, device)
    model = _shard(decoder.build(settings).to(device), settings, mesh)
    if name in _SHARDED:
        arithmetic = _coefficients(settings), newton_schulz_dtype(settings, device)
        return Contender(name, model, _SHARDED[name](model, _MUON_LR, _ADAMW_LR, *arithmetic))
    return Contender(name, model, _PUBLIC[name](model, _MUON_LR, _ADAMW_LR))


_BESIDE = {ADAMW: make_adamw, DMUON: make_dmuon}
_SHARDED: dict[str, type[ShardedMuon]] = {GATHER: GatheringMuon, ALLTOALL: ExchangingMuon}
_PUBLIC: dict[str, Callable[[nn.Module, float, float], torch.optim.Optimizer]] = {
    MUON_FSDP2: public.muon_fsdp2,
    TORCH_MUON: public.torch_muon,
}


def _coefficients(settings: Settings) -> Coefficients:
    """All contenders do the same arithmetic, so the ones that public contenders know with them."""
    if set(PUBLIC) & set(settings.contenders):
        return dmuon.CLASSIC_COEFFICIENTS
    return dmuon.POLAR_EXPRESS_COEFFICIENTS


def newton_schulz_dtype(settings: Settings, device: torch.device) -> torch.dtype:
    """The dtype of Newton-Schulz of all Muons but public ones."""
    if settings.ns_dtype is None:
        return default_dtype(device)
    return torch.bfloat16 if settings.ns_dtype == "bfloat16" else torch.float32


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
