"""What a model is called through, and how often before a backward, against one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_net import Net, layers_of, loss, text
from one_process import Batch, Training, assert_equals_one_process
from ranks_runner import run_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch.func import functional_call

import dmuon

SHAPES = pytest.mark.parametrize(("shape", "reshard"), [((2,), True), ((2, 2), False)], ids=str)


def loss_of_three_forwards(model: nn.Module, given: Batch) -> torch.Tensor:
    parts = [loss(model, {"rows": rows}) for rows in given["rows"].chunk(3)]
    return torch.stack(parts).mean()


@SHAPES
def test_several_forwards_before_one_backward(shape: tuple[int, ...], reshard: bool) -> None:
    training = Training(Net, text, layers_of, loss_of_three_forwards)
    assert_equals_one_process(training, shape, reshard)


class Scaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(rows)


def loss_of_functional_call(model: nn.Module, given: Batch) -> torch.Tensor:
    logits = functional_call(model, {"scale": torch.tensor(2.0)}, (given["rows"][:, :-1],))
    return F.cross_entropy(logits.flatten(0, 1), given["rows"][:, 1:].flatten())


@SHAPES
def test_functional_call_with_another_buffer(shape: tuple[int, ...], reshard: bool) -> None:
    training = Training(Scaled, text, layers_of, loss_of_functional_call)
    assert_equals_one_process(training, shape, reshard)


def compile_blocks(model: Any) -> nn.Module:
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


def compile_whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


@pytest.mark.parametrize(
    ("compiled", "shape", "reshard"),
    [
        (compile_blocks, (2, 2), False),
        (compile_whole, (2,), True),
        (compile_whole, (2, 2), False),
    ],
    ids=["blocks", "whole", "whole on a grid"],
)
def test_compiled_after_wrapping(
    compiled: Callable[[nn.Module], nn.Module], shape: tuple[int, ...], reshard: bool
) -> None:
    training = Training(Net, text, layers_of, loss, finish=compiled)
    assert_equals_one_process(training, shape, reshard, steps=3)


@pytest.mark.parametrize("compiled", [compile_blocks, compile_whole])
def test_compiled_means_compiled(compiled: Callable[[nn.Module], nn.Module]) -> None:
    def body(rank: int) -> None:
        model = compiled(Training(Net, text, layers_of, loss).wrap((1,)))
        dmuon.Muon(model)
        loss(model, text(0)).backward()
        assert counters["stats"]["unique_graphs"] > 0

    run_ranks(1, body)


@pytest.mark.parametrize("with_grad", [True, False])
def test_a_compiled_model_runs_without_an_optimizer(with_grad: bool) -> None:
    def body(rank: int) -> None:
        training = Training(Net, text, layers_of, loss)
        model = compile_whole(training.wrap((1,)))
        with torch.set_grad_enabled(with_grad):
            torch.testing.assert_close(loss(model, text(0)), loss(training.build(), text(0)))

    run_ranks(1, body)


def evaluate(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        loss(model, text(100))
    return model


@pytest.mark.parametrize("shape", [(1,), (2,)], ids=str)
def test_a_model_may_be_evaluated_before_it_gets_its_optimizer(shape: tuple[int, ...]) -> None:
    assert_equals_one_process(Training(Net, text, layers_of, loss, finish=evaluate), shape)
