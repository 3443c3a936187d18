"""``dmuon plan``: what a step of a job would cost on many workers, worked out without them."""

import argparse
import json
import re

import torch
from torch import nn

import dmuon
from dmuon_platform import preflight
from dmuon_platform.assembly import precision
from dmuon_platform.durable_file import write_whole
from dmuon_platform.errors import PlatformError, SpecError
from dmuon_platform.model import (
    build_model,
    flops_per_token,
    is_hidden,
    layer_modules,
    vocabulary_size,
)
from dmuon_platform.plan_text import plan_text
from dmuon_platform.spec import JobSpec

MOST_WORKERS = 16_384

_RATE = re.compile(r"([0-9]*\.?[0-9]+) ?([KMGT]?)(B|b|bit)/s")
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def run(spec: JobSpec, arguments: argparse.Namespace) -> int:
    """Print the plan of a job for the most workers it allows; write it to a file if asked to.

    Raises:
        SpecError: There are too many, or the cluster is described wrongly.
    """
    num_workers = spec.fitting_workers[-1]
    forecast = forecast_of(spec, num_workers, read_cluster(arguments))
    if arguments.json is not None:
        content = {"name": spec.name, "workers": num_workers, **forecast.to_dict()}
        try:
            write_whole(arguments.json, json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise PlatformError(
                f"--json {arguments.json} cannot be written ({error.strerror or error}); name a "
                "file in a folder that exists."
            ) from error
    print(plan_text(spec, forecast))
    return 0


def forecast_of(
    spec: JobSpec, num_workers: int, cluster: "dmuon.Cluster | None"
) -> "dmuon.Forecast":
    """Work out what a step of the job costs on that many workers.

    Raises:
        SpecError: They do not fit its mesh or batch, or its model cannot be built.
    """
    if spec.optimizer.algorithm != "muon":
        raise SpecError(
            "With optimizer.algorithm = 'adamw' nothing has an owner, so there is no plan. What "
            "AdamW costs is beside Muon in the plan with --set optimizer.algorithm=muon."
        )
    if num_workers > MOST_WORKERS:
        raise SpecError(
            f"A plan is for {MOST_WORKERS:,} workers at most, not {num_workers:,}: set --workers."
        )
    mesh, num_micro_batches = spec.resolve_mesh(num_workers), spec.accumulation(num_workers)
    spec = preflight.resolve(spec)
    model = build_model(spec.model, spec.data.sequence_length, device="meta")
    layers = layer_modules(model)
    workload = dmuon.Workload(
        tokens=spec.train.micro_batch_size * spec.data.sequence_length,
        num_micro_batches=num_micro_batches,
        layers=len(layers),
        hidden=_width(model),
        vocabulary=vocabulary_size(spec.model),
        checkpointing=spec.train.activation_checkpointing,
        flops_per_token=flops_per_token(spec.model, spec.data.sequence_length),
        ns_steps=spec.optimizer.ns_steps,
        ns_itemsize=getattr(torch, spec.optimizer.ns_dtype or "bfloat16").itemsize,
    )
    units = set(layers)
    has_gpus = cluster is not None or spec.resources.gpus_per_worker > 0
    return dmuon.plan(
        model,
        mesh,
        workload,
        is_hidden,
        cluster=cluster,
        reshard_after_forward=spec.train.reshard_after_forward,
        reshard_root=spec.train.reshard_after_forward,
        mp_policy=precision(spec),
        hook_boundary_predicate=lambda _, module: module in units,
        transport="reduce" if has_gpus else "all_to_all",
    )


def read_cluster(arguments: argparse.Namespace) -> "dmuon.Cluster | None":
    """Return the cluster that the options describe; None without ``--gpu``.

    Raises:
        SpecError: They do not describe one.
    """
    rates = {name: getattr(arguments, name) for name in ("intra", "inter")}
    known = {name: read_rate(f"--{name}", text) for name, text in rates.items() if text is not None}
    if arguments.gpu is None:
        if known:
            raise SpecError(
                f"--{next(iter(known))} tells how fast a cluster is, but not of which GPUs: add "
                "--gpu h100, say."
            )
        return None
    try:
        return dmuon.Cluster(
            arguments.gpu.lower(),
            gpus_per_node=arguments.gpus_per_node,
            achieved=arguments.achieved,
            **known,
        )
    except dmuon.SetupError as error:
        raise SpecError(f"The cluster of this plan: {error}.") from error


def read_rate(option: str, text: str) -> float:
    """Return bytes a second.

    Raises:
        SpecError: The text is no rate.
    """
    found = _RATE.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        raise SpecError(
            f"{option} {text!r} is no rate above zero: write a number and a unit, such as 450GB/s "
            "(bytes) or 400Gb/s (bits, an eighth)."
        )
    number, prefix, unit = found.groups()
    return float(number) * _PREFIXES[prefix] / (1 if unit == "B" else 8)


def _width(model: nn.Module) -> int:
    embeddings = [one for one in model.modules() if isinstance(one, nn.Embedding)]
    return embeddings[0].embedding_dim if embeddings else 0
