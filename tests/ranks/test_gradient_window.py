"""Gradients on a grid: few are under way at a time, and no rank waits for one that cannot come."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from exact import assert_identical
from live_memory import LiveMemory
from ranks_runner import run_ranks
from torch import nn
from wrapped import make_mesh

import dmuon
from dmuon import dedication, ledger

WIDTH = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(4))

    def forward(self, x: torch.Tensor, num_used: int) -> torch.Tensor:
        for matrix in self.matrices[:num_used]:
            x = x + torch.tanh(x @ matrix)
        return x


class Deep(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x: torch.Tensor, num_used_by_last: int = 4) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, num_used_by_last if layer is self.layers[-1] else 4)
            if layer is self.layers[0]:  # all ranks meet here, as in a layer that shares statistics
                x.register_hook(lambda grad: dist.barrier())
        return x


def prepare(num_layers: int, reshard: bool = True) -> Deep:
    torch.manual_seed(0)
    model = Deep(num_layers)
    dmuon.dedicate_params(
        model,
        make_mesh(2, 2),
        lambda name, param: True,
        hook_boundary_predicate=lambda name, module: isinstance(module, Layer),
        reshard_after_forward=reshard,
        timeout=timedelta(seconds=30),
    )
    return model


def backward(model: Deep, rank: int, step: int, num_used_by_last: int = 4) -> None:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    model(x, num_used_by_last).square().mean().backward()


def test_gradients_under_way_take_no_more_memory_in_a_deeper_model() -> None:
    def peak(num_layers: int, rank: int) -> int:
        model = prepare(num_layers)
        backward(model, rank, 0)  # makes what is made once
        model.zero_grad()
        memory = LiveMemory()
        with memory:
            backward(model, rank, 1)
            dedication.of(model).engine.settle_gradients()
        grads = dedication.of(model).engine.ledger.named_grads().values()
        return memory.peak(without=memory.watch(grads))

    def body(rank: int) -> None:
        shallow, deep = peak(6, rank), peak(18, rank)
        assert deep < 1.1 * shallow

    run_ranks(4, body)


@pytest.mark.parametrize("num_used", [0, 2], ids=["no gradient", "some gradients"])
def test_a_rank_without_gradients_of_the_last_block_keeps_nobody_waiting(
    num_used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends zeros at the end of its backward, for which the others must not wait before."""

    def body(rank: int) -> None:
        def weights(most_under_way: int) -> dict[str, torch.Tensor]:
            monkeypatch.setattr(ledger, "MOST_UNDER_WAY", most_under_way)
            model = prepare(6, reshard=False)
            optimizer = dmuon.Muon(model, ns_steps=1)
            for step in range(3):  # the second is the same on all ranks
                backward(model, rank, step, num_used if rank == 0 and step != 1 else 4)
                optimizer.step()
                optimizer.zero_grad()
            return dmuon.get_model_state_dict(model)

        assert_identical(weights(2), weights(99))

    run_ranks(4, body)
