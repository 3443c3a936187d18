"""Random small models: what a case of the fuzz test trains."""

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dmuon

SEQUENCE = 4


@dataclass
class Held:
    """An output class that torch's pytree does not know."""

    value: torch.Tensor


class Named(NamedTuple):
    extra: None
    value: torch.Tensor


OUTPUTS = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, None),
    "dict": lambda x: {"a": [x], "b": 1},
    "namedtuple": lambda x: Named(None, x),
    "object": Held,
}
TAKEN = {
    "tensor": lambda out: out,
    "tuple": lambda out: out[0],
    "dict": lambda out: out["a"][0],
    "namedtuple": lambda out: out.value,
    "object": lambda out: out.value,
}


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """``hidden`` is not used: queries, keys and values are fused along the rows."""

    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v)


class Parent(nn.Module):
    """Its parent, torch's own attention, uses the output matrix; the module is never called."""

    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1, bias=bias, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Narrow(nn.Module):
    """Matrices of one row and of one column."""

    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.to_one = nn.Linear(width, 1, bias=bias)
        self.from_one = nn.Linear(1, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.from_one(torch.tanh(self.to_one(x)))


class Experts(nn.Module):
    """A dense mixture: a stack of matrices and a router."""

    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3, bias=bias)
        self.experts = nn.Parameter(torch.randn(3, width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mix = self.router(x).softmax(-1)
        return torch.einsum("bte,btd,edf->btf", mix, x, self.experts)


class Convolution(nn.Module):
    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.mT).mT


class Tied(nn.Module):
    """One matrix under two names."""

    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=bias)
        self.second = nn.Linear(width, width, bias=bias)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


KINDS = (Mlp, Mlp, Attention, Parent, Narrow, Experts, Convolution, Tied)


class Layer(nn.Module):
    def __init__(self, inner: nn.Module, width: int, output: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = inner
        self.output = output

    def forward(self, x: torch.Tensor) -> object:
        return OUTPUTS[self.output](x + self.inner(self.norm(x)))


@dataclass(frozen=True)
class Shape:
    """What a random model looks like; a pure function of the seed."""

    width: int
    kinds: tuple[tuple[type[nn.Module], int, bool], ...]
    order: tuple[int, ...]  # which layer is called when: some twice, some never
    outputs: tuple[str, ...]
    recomputed: tuple[bool, ...]
    frozen: tuple[int, ...]

    @staticmethod
    def draw(rng: random.Random) -> "Shape":
        num_layers = rng.randint(1, 4)
        kinds = tuple(
            (rng.choice(KINDS), rng.randint(1, 20), rng.random() < 0.5) for _ in range(num_layers)
        )
        order = list(range(num_layers))
        if rng.random() < 0.3:
            order.append(rng.randrange(num_layers))
        if num_layers > 1 and rng.random() < 0.2:
            order.pop(rng.randrange(num_layers))
        return Shape(
            width=rng.randint(3, 14),
            kinds=kinds,
            order=tuple(order),
            outputs=tuple(rng.choice(sorted(OUTPUTS)) for _ in range(num_layers)),
            recomputed=tuple(rng.random() < 0.25 for _ in range(num_layers)),
            frozen=tuple(rng.randrange(20) for _ in range(rng.choice((0, 0, 1, 2)))),
        )


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.shape = shape
        self.embed = nn.Linear(3, width)
        self.layers = nn.ModuleList(
            Layer(kind(width, hidden, bias), width, output)
            for (kind, hidden, bias), output in zip(shape.kinds, shape.outputs, strict=True)
        )
        self.head = nn.Linear(width, 2, bias=False)
        matrices = [p for n, p in self.named_parameters() if p.ndim > 1 and "layers" in n]
        for place in shape.frozen:
            if len(matrices) > 1:
                matrices[place % (len(matrices) - 1)].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for index in self.shape.order:
            layer = self.layers[index]
            if self.shape.recomputed[index]:
                out = checkpoint(layer, x, use_reentrant=False)
            else:
                out = layer(x)
            x = TAKEN[self.shape.outputs[index]](out)
        return self.head(x)


def build(shape: Shape, seed: int) -> Model:
    torch.manual_seed(seed)
    return Model(shape)


def split_of(name: str, param: nn.Parameter) -> "dmuon.Split | None":
    """The declared splits of these models."""
    if name.endswith(("qkv.weight", "in_proj_weight")):
        return dmuon.Split(param.shape[0] // 3)
    return None


def batch(seed: int, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed * 1000 + step)
    return (
        torch.randn(size, SEQUENCE, 3, generator=generator),
        torch.randn(size, SEQUENCE, 2, generator=generator),
    )


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)
