"""Two narrow layers beside fully_shard: cheap enough for hundreds of steps on ranks."""

import torch
from tiny import is_proj
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import dmuon

WIDTH = 128


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.in_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out_proj(torch.relu(self.in_proj(self.norm(x))))


def prepare_narrow(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    dmuon.dedicate_params(model, mesh, predicate=is_proj)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def narrow_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.roll(1)).square().mean()
