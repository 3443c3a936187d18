"""Modules of torch.nn, and weights that are computed from others, against one process."""

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_process import Batch, Training, assert_equals_one_process
from torch import nn
from torch.nn.utils import parametrizations

import dmuon

WIDTH = 16
Make = Callable[[], nn.Module]


class Net(nn.Module):
    """Two blocks between an input matrix that belongs to the root and a head."""

    def __init__(self, make_block: Make) -> None:
        super().__init__()
        self.front = nn.Linear(6, WIDTH)
        self.layers = nn.ModuleList([make_block(), make_block()])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x_BTI: torch.Tensor) -> torch.Tensor:
        x_BTD = self.front(x_BTI)
        for layer in self.layers:
            x_BTD = x_BTD + layer(x_BTD)
        return self.head(x_BTD)


def batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(12, 4, 6, generator=generator),
        "y": torch.randn(12, 4, 5, generator=generator),
    }


def loss(model: nn.Module, given: Batch) -> torch.Tensor:
    return F.mse_loss(model(given["x"]), given["y"])


def layers_of(model: Any) -> nn.ModuleList:
    return model.layers


class Calling(nn.Module):
    """A block that calls its only module in its own way."""

    def __init__(self, inner: nn.Module, how: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner = inner
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self.inner, x)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)


def decoder() -> nn.Module:
    layer = nn.TransformerDecoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
    return Calling(nn.TransformerDecoder(layer, 2), lambda inner, x: inner(x, x.flip(1)))


def attention() -> nn.Module:
    fused = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    return Calling(fused, lambda inner, x: inner(x, x, x)[0])


def attention_apart() -> nn.Module:
    apart = nn.MultiheadAttention(WIDTH, 2, kdim=8, vdim=4, batch_first=True)
    return Calling(apart, lambda inner, x: inner(x, x[..., :8], x[..., :4])[0])


def convolutions() -> nn.Module:
    """Over the sequence: plain, in groups, and depthwise, which is no hidden matrix."""
    kinds = [nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=groups) for groups in (1, 4, WIDTH)]
    return Calling(nn.Sequential(*kinds), lambda inner, x: inner(x.mT).mT)


def lstm() -> nn.Module:
    recurrent = nn.LSTM(WIDTH, WIDTH // 2, 2, batch_first=True, bidirectional=True)
    return Calling(recurrent, lambda inner, x: inner(x)[0])


def gru() -> nn.Module:
    return Calling(nn.GRU(WIDTH, WIDTH, batch_first=True), lambda inner, x: inner(x)[0])


def bilinear() -> nn.Module:
    return Calling(nn.Bilinear(WIDTH, WIDTH, WIDTH), lambda inner, x: inner(x, x))


def old_weight_norm() -> nn.Module:
    return nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def spectral_norm() -> nn.Module:
    """Iterated until it stands still: one process calls it once for each rank's share."""
    linear = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(parametrizations.spectral_norm(linear, n_power_iterations=300), nn.Tanh())


def orthogonal() -> nn.Module:
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


class LoRA(nn.Module):
    """A frozen matrix and a trained correction of low rank that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.A = nn.Parameter(torch.randn(3, WIDTH))
        self.B = nn.Parameter(torch.zeros(WIDTH, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.A), self.B)


class Twice(nn.Module):
    """One module under two names, called under both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Buffers(nn.Module):
    """Buffers that are saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.scale + self.shift)


def chain(*widths: int) -> Make:
    """Linear modules through these widths."""

    def make() -> nn.Module:
        steps = [nn.Linear(a, b) for a, b in pairwise(widths)]
        return nn.Sequential(*[part for step in steps for part in (step, nn.Tanh())])

    return make


BLOCKS: dict[str, Make] = {
    "encoder": encoder,
    "decoder": decoder,
    "attention": attention,
    "attention apart": attention_apart,
    "convolutions": convolutions,
    "lstm": lstm,
    "gru": gru,
    "bilinear": bilinear,
    "old weight_norm": old_weight_norm,
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "orthogonal": orthogonal,
    "lora": LoRA,
    "buffers": Buffers,
    "wide": chain(WIDTH, 1, 4096, 1, WIDTH),
    "tiny": chain(WIDTH, 1, 1, 2, 3, WIDTH),
    "primes": chain(WIDTH, 7, 13, 5, WIDTH),
}


def training(make_block: Make) -> Training:
    return Training(lambda: Net(make_block), batch, layers_of, loss)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(("shape", "reshard"), [((3,), True), ((2, 2), False)], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_training_equals_one_process(name: str, shape: tuple[int, ...], reshard: bool) -> None:
    assert_equals_one_process(training(BLOCKS[name]), shape, reshard)


@pytest.mark.parametrize(("shape", "reshard"), [((3,), True), ((2, 2), False)], ids=str)
def test_one_module_under_two_names(shape: tuple[int, ...], reshard: bool) -> None:
    assert_equals_one_process(training(Twice), shape, reshard)


def thirds(name: str, param: nn.Parameter) -> dmuon.Split | None:
    return dmuon.Split(WIDTH) if name.endswith("in_proj_weight") else None


@pytest.mark.parametrize(("shape", "reshard"), [((3,), True), ((2, 2), False)], ids=str)
def test_a_fused_projection_whose_parts_are_declared(shape: tuple[int, ...], reshard: bool) -> None:
    declared = dataclasses.replace(training(attention), splits=thirds)
    assert_equals_one_process(declared, shape, reshard)
