"""A model of which nothing is dedicated: AdamW trains it, and all else is as ever."""

import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks_runner import run_ranks
from tiny import build, loss_of, share, tokens
from torch import nn
from torch.distributed.fsdp import fully_shard
from wrapped import make_mesh

import dmuon

LR = 3e-3


def prepared(shape: tuple[int, ...]) -> tuple[nn.Module, dmuon.Muon]:
    mesh, model = make_mesh(*shape), build()
    plan = dmuon.dedicate_params(model, mesh, None)
    assert plan.matrices == ()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, dmuon.Muon(model, adamw_lr=LR)


def train(model: nn.Module, optimizer: dmuon.Muon, steps: range) -> None:
    for step in steps:
        rows = share(tokens(step), dist.get_rank(), dist.get_world_size())
        for part, is_last in zip(rows.tensor_split(2), (False, True), strict=True):
            with nullcontext() if is_last else dmuon.no_sync(model):
                (loss_of(model, part) * len(part) / len(rows)).backward()
        dmuon.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2)])
def test_it_is_torchs_adamw_through_clipping_and_a_checkpoint(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    def body(rank: int) -> None:
        model, optimizer = prepared(shape)
        train(model, optimizer, range(3))
        dmuon.save_checkpoint(tmp_path / "half", model, optimizer)
        model, optimizer = prepared(shape)
        dmuon.load_checkpoint(tmp_path / "half", model, optimizer)
        train(model, optimizer, range(3, 6))
        state = dmuon.get_model_state_dict(model)
        assert dmuon.get_counters(model).newton_schulz == 0

        alone = build()
        adamw = torch.optim.AdamW(alone.parameters(), lr=LR, weight_decay=0.01)
        for step in range(6):
            loss_of(alone, tokens(step)).backward()
            torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
            adamw.step()
            adamw.zero_grad()
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=2e-5)

    run_ranks(math.prod(shape), body)
