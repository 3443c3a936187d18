"""Looking at what is dedicated, to whom, and what has been done."""

from torch import nn

from dmuon import dedication as dedications
from dmuon.counters import Counters


def get_dedicated_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every dedicated parameter by name, in the order of the model; equal on all ranks."""
    return {param.name: param.param for param in dedications.of(model).params}


def get_owned_params(model: nn.Module, rank: int | None = None) -> dict[str, nn.Parameter]:
    """The dedicated parameters that one rank of the mesh owns.

    Args:
        model: as given to ``dedicate_params``.
        rank: an owner number in ``range(world size of the mesh)``; None: this rank.
    """
    dedication = dedications.of(model)
    owner = dedication.owner_map.rank if rank is None else rank
    if not 0 <= owner < dedication.owner_map.num_owners:
        raise ValueError(
            f"rank must be in [0, {dedication.owner_map.num_owners}), the ranks of the mesh, "
            f"got {rank}"
        )
    return {param.name: param.param for param in dedication.params if param.owner == owner}


def get_counters(model: nn.Module) -> Counters:
    """What this rank has done for dedicated parameters so far; the object goes on counting."""
    return dedications.of(model).engine.counters


def describe(model: nn.Module) -> str:
    """The plan, and by name what AdamW takes instead."""
    dedication = dedications.of(model)
    owned = {param.param for param in dedication.params}
    rest = [name for name, param in model.named_parameters() if param not in owned]
    return f"{dedication.plan}\nleft to FSDP2 and AdamW: {', '.join(rest) or 'nothing'}"
