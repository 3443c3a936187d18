"""Real checkpoints of a small trained model with tied weights, written by two ranks."""

import json
from pathlib import Path

import torch
from ranks_runner import run_ranks
from tiny import build
from torch import nn
from wrapped import make_mesh, train, wrap

import dmuon
from dmuon.checkpoint.saving import save_checkpoint

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
