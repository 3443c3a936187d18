"""A small model of blocks for tests to vary: what blocks return, share and are called through."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from one_process import Batch
from torch import nn

WIDTH, VOCAB = 12, 23


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 20)
        self.down = nn.Linear(20, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks of one class, a head; ``run`` says how a block is used."""

    def __init__(self, block: Callable[[], nn.Module] = Block, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.embed(rows)
        for layer in self.layers:
            x = self.run(layer, x)
        return self.head(x)


def text(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return {"rows": torch.randint(0, VOCAB, (12, 6), generator=generator)}


def loss(model: nn.Module, given: Batch) -> torch.Tensor:
    logits = model(given["rows"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), given["rows"][:, 1:].flatten())


def layers_of(model: Any) -> Iterable[nn.Module]:
    return model.layers
