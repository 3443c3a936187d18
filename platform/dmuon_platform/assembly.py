"""From a job to a model spread over the workers, and its optimizer."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import dmuon
from dmuon_platform.model import build_model, is_hidden, layer_modules
from dmuon_platform.place import Place
from dmuon_platform.spec import JobSpec


def assemble(spec: JobSpec, place: Place) -> tuple[nn.Module, "dmuon.Muon", "dmuon.Plan"]:
    """Build the model from the seed, spread it over the mesh, and give it its optimizer.

    Collective over the mesh. Every rank draws the same initial weights, on the CPU, so they do
    not depend on the device or the mesh.
    """
    torch.manual_seed(spec.train.seed)
    model = build_model(spec.model, spec.data.sequence_length, device="cpu").to(place.device)
    policy = precision(spec)
    whole_after = spec.train.reshard_after_forward
    plan = dmuon.dedicate_params(
        model, place.mesh, muon_takes(spec), reshard_after_forward=whole_after, mp_policy=policy
    )
    for layer in layer_modules(model):
        _wrap_forward(spec, layer)
        fully_shard(layer, mesh=place.mesh, mp_policy=policy, reshard_after_forward=whole_after)
    fully_shard(model, mesh=place.mesh, mp_policy=policy, reshard_after_forward=whole_after)
    return model, _optimizer(spec, model), plan


def muon_takes(spec: JobSpec) -> Callable[[str, nn.Parameter], bool] | None:
    """Return what chooses the parameters that Muon trains; None: AdamW trains all."""
    return is_hidden if spec.optimizer.algorithm == "muon" else None


def precision(spec: JobSpec) -> MixedPrecisionPolicy:
    """Return the dtypes of weights and gradients on their way."""
    if spec.train.precision == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _wrap_forward(spec: JobSpec, layer: nn.Module) -> None:
    # The forward alone, so that names stay as they are and hooks stay outside the graph.
    if spec.train.compile:
        layer.forward = torch.compile(layer.forward)
    if spec.train.activation_checkpointing:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _optimizer(spec: JobSpec, model: nn.Module) -> "dmuon.Muon":
    options = spec.optimizer
    return dmuon.Muon(
        model,
        lr=options.lr,
        momentum=options.momentum,
        nesterov=options.nesterov,
        weight_decay=options.weight_decay,
        ns_steps=options.ns_steps,
        ns_dtype=None if options.ns_dtype is None else getattr(torch, options.ns_dtype),
        adjust_lr_fn=options.adjust_lr_fn,
        adamw_lr=options.adamw_lr,
        adamw_betas=options.adamw_betas,
        adamw_eps=options.adamw_eps,
        adamw_weight_decay=options.adamw_weight_decay,
    )
