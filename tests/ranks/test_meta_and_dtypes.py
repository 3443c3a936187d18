"""Models that begin without values, or whose matrices differ in dtype, against one process."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_process import Batch, Training, assert_equals_one_process
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import dmuon

WIDTH = 10
SHAPES = pytest.mark.parametrize(("shape", "reshard"), [((2,), True), ((2, 2), False)], ids=str)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.recurrent(x)[0])


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block(), block()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class TiedNet(Net):
    """The blocks share one matrix, which therefore belongs to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.tie()

    def tie(self) -> None:
        self.layers[1].down.weight = self.layers[0].down.weight


def batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(8, 4, WIDTH, generator=generator),
        "y": torch.randn(8, 4, 3, generator=generator),
    }


def loss(model: nn.Module, given: Batch) -> torch.Tensor:
    return F.mse_loss(model(given["x"]), given["y"])


def layers_of(model: Any) -> Iterable[nn.Module]:
    return model.layers


def initialise(model: nn.Module) -> nn.Module:
    """As a user does after ``to_empty``, matrices with an initialisation that needs them whole."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if dmuon.is_hidden_matrix(name, param):
                nn.init.orthogonal_(param, generator=generator)
                continue
            value = 0.3 * torch.randn(param.shape, generator=generator)
            if isinstance(param, DTensor):
                value = distribute_tensor(value, param.device_mesh, param.placements)
            param.copy_(value)
    return model


def on_meta(make: type[Net]) -> Net:
    with torch.device("meta"):
        return make()


def fill(model: Net) -> nn.Module:
    model.to_empty(device="cpu")
    if isinstance(model, TiedNet):
        model.tie()  # to_empty of torch takes ties apart
    return initialise(model)


@SHAPES
@pytest.mark.parametrize("make", [Net, TiedNet])
def test_a_model_from_the_meta_device_initialised_in_place(
    make: type[Net], shape: tuple[int, ...], reshard: bool
) -> None:
    training = Training(
        lambda: on_meta(make),
        batch,
        layers_of,
        loss,
        finish=fill,
        alone=lambda: initialise(make()),
    )
    assert_equals_one_process(training, shape, reshard)


class Mixed(nn.Module):
    """A matrix in bfloat16 beside others in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 14)
        self.down = nn.Linear(14, WIDTH, bias=False).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x)).bfloat16()
        return x + F.linear(hidden, self.down.weight.bfloat16()).float()


class MasterOfMixed(Mixed):
    """The same computation with a float32 master of the bfloat16 matrix, as owners keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.down.float()


@SHAPES
def test_two_dtypes_in_one_block(shape: tuple[int, ...], reshard: bool) -> None:
    training = Training(
        lambda: Net(Mixed),
        batch,
        layers_of,
        loss,
        alone=lambda: Net(MasterOfMixed),
        bound=5e-3,  # masters that differ by float32 rounding may round to different bfloat16
    )
    assert_equals_one_process(training, shape, reshard)
