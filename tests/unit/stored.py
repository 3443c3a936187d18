"""Checkpoints of a run written by one process, as the ranks of a training write them."""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from dmuon_platform.store import Checkpoint, CheckpointStore
from torch import Tensor
from unit.checkpoint_builders import write

from dmuon.checkpoint.durable_file import write_file
from dmuon.checkpoint.facts import facts_of
from dmuon.checkpoint.manifest import Manifest, OptimizerFacts, write_manifest

MODEL_FILE = "model.safetensors"
OPTIM_FILE = "optim-00001-of-00001.safetensors"


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(7, 4, generator=generator),
        "model.norm.weight": torch.ones(4),
    }


def write_parts(
    folder: Path,
    step: int,
    files: Mapping[str, Mapping[str, Tensor]],
    *,
    extra: Mapping[str, Any] | None = None,
    texts: Mapping[str, bytes] | None = None,
    tied: Mapping[str, str] | None = None,
) -> None:
    """Everything that is in a checkpoint, the manifest last."""
    folder.mkdir(parents=True)
    facts = {name: write(folder / name, tensors) for name, tensors in files.items()}
    facts |= {name: write_file(folder / name, data) for name, data in (texts or {}).items()}
    manifest = Manifest(
        step=step,
        files=facts,
        tensors={
            file: {name: facts_of(tensor) for name, tensor in tensors.items()}
            for file, tensors in files.items()
        },
        mesh={"replicate": 1, "shard": 1},
        optimizer=OptimizerFacts([], step, {}),
        tied=tied or {},
        extra=extra or {},
        created=time.time(),
    )
    write_manifest(folder, manifest)


def write_small(folder: Path, step: int, loss: float | None = None) -> None:
    moments = {"exp_avg/model.norm.weight": torch.full((4,), float(step))}
    metrics = {} if loss is None else {"evaluation/loss": loss}
    files = {MODEL_FILE: weights(step), OPTIM_FILE: moments}
    write_parts(folder, step, files, extra={"metrics": metrics})


def save(
    store: CheckpointStore, step: int, attempt: int | None = None, loss: float | None = None
) -> Checkpoint:
    write_small(store.begin(step, attempt), step, loss)
    return store.commit(step, attempt)


def save_many(store: CheckpointStore, losses: Mapping[int, float | None]) -> None:
    """Checkpoints of many steps that share their tensors, without waiting for the disk."""
    first, *others = losses
    one = save(store, first, loss=losses[first])
    for step in others:
        folder = one.path.with_name(f"step-{step:08d}")
        folder.mkdir()
        for name in one.manifest.files:
            os.link(one.path / name, folder / name)
        loss = losses[step]
        extra = {"metrics": {} if loss is None else {"evaluation/loss": loss}}
        manifest = replace(one.manifest, step=step, extra=extra, created=float(step))
        (folder / "manifest.json").write_text(manifest.to_json())
