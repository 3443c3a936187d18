"""The tiny model prepared for training on several ranks, and its training loop."""

import torch
import torch.distributed as dist
from tiny import build, is_proj, loss_of, share, tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.packing import Packing


def make_mesh(*shape: int) -> DeviceMesh:
    names = ("replicate", "shard") if len(shape) == 2 else None
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def wrap(
    model: nn.Module, mesh: DeviceMesh, reshard: bool = True, packing: Packing = "auto"
) -> nn.Module:
    dmuon.dedicate_params(
        model, mesh, predicate=is_proj, reshard_after_forward=reshard, packing=packing
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    return model


def prepare(
    mesh: DeviceMesh, reshard: bool = True, seed: int = 0, packing: Packing = "auto"
) -> nn.Module:
    return wrap(build(seed), mesh, reshard, packing)


def backward(model: nn.Module, step: int) -> torch.Tensor:
    """The local loss of this rank's share of a step's batch, after its backward."""
    loss = loss_of(model, share(tokens(step), dist.get_rank(), dist.get_world_size()))
    loss.backward()
    return loss.detach()


def global_mean(value: torch.Tensor) -> float:
    total = value.clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The global loss of each step."""
    losses = []
    for step in steps:
        loss = backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(global_mean(loss))
    return losses
