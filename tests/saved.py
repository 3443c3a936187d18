"""Checkpoints for tests of tools: of a small trained model with tied weights, and by hand."""

import json
from pathlib import Path

import torch
from ranks_runner import run_ranks
from safetensors.torch import load_file
from tiny import build
from torch import nn
from wrapped import make_mesh, train, wrap

import dmuon
from dmuon import save_checkpoint
from dmuon.checkpoint.facts import facts_of
from dmuon.checkpoint.manifest import Manifest, OptimizerFacts, write_manifest
from dmuon.checkpoint.tensor_file import write_tensors

CONFIG = json.dumps({"model_type": "tiny"}).encode()


def tied() -> nn.Module:
    model = build()
    model.head.weight = model.embed.weight
    return model


def write_checkpoints(folder: Path, num: int = 2) -> None:
    """``folder/step-1`` and on, one step of training apart."""

    def body(rank: int) -> None:
        model = wrap(tied(), make_mesh(2))
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        for step in range(num):
            train(model, optimizer, range(step, step + 1))
            save_checkpoint(
                folder / f"step-{step + 1}",
                model,
                optimizer,
                extra={"tokens": 96 * (step + 1), "betas": (0.9, 0.95)},
                files={"config.json": CONFIG},
            )

    run_ranks(2, body)


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def hand_made(
    folder: Path,
    step: int,
    tensors: dict[str, torch.Tensor],
    *,
    optimizer: OptimizerFacts | None = None,
    extra: dict[str, object] | None = None,
    tied: dict[str, str] | None = None,
) -> Path:
    """A checkpoint of given weights, without a model."""
    folder.mkdir(parents=True)
    facts = {name: facts_of(tensor) for name, tensor in tensors.items()}
    files = {"model.safetensors": write_tensors(folder / "model.safetensors", facts, tensors.get)}
    mesh = {"replicate": 1, "shard": 1}
    by_file = {"model.safetensors": facts}
    manifest = Manifest(
        step, files, by_file, mesh, tied=tied or {}, optimizer=optimizer, extra=extra or {}
    )
    write_manifest(folder, manifest)
    return folder


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("model*.safetensors"):
        weights |= load_file(file)
    return weights
