"""Replicas start equal, whatever seeds they were built with."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def send_first_row(model: nn.Module) -> None:
    """Give every replica of a symmetric parameter the values of the first. Collective.

    Reductions keep replicas equal only if they start so; ``fully_shard`` does not compare them.
    Parameters on the meta device have no values yet and are passed over, on all ranks alike.
    """
    for param in model.parameters():
        if not isinstance(param, DTensor):
            continue
        local = param.to_local()
        if local.is_meta or local.numel() == 0:  # an empty shard is empty in every replica
            continue
        for axis, placement in enumerate(param.placements):
            mesh = param.device_mesh
            if placement.is_replicate() and mesh.size(axis) > 1:
                dist.broadcast(local, group=mesh.get_group(axis), group_src=0)
