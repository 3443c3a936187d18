"""Looking at what is dedicated, to whom, and what has been done."""

import torch
from torch import nn

from dmuon import dedication as dedications
from dmuon.counters import Counters
from dmuon.dedication import Dedication
from dmuon.names import original_name
from dmuon.selection import embedding_weights, why_not_hidden


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
    """Who owns what, and why AdamW takes the rest, as text. Local: no collective.

    A table of the dedicated parameters (owner, shape, Newton-Schulz work and bytes, and what they
    hold where that is more than one matrix), the totals of every owner, and the names of all other
    parameters below the reason why they are not dedicated. Frozen parameters are listed last: they
    are not updated while they are frozen.
    """
    dedication = dedications.of(model)
    owned = {param.param for param in dedication.params}
    embedded = embedding_weights(model)
    first_names: dict[nn.Parameter, str] = {}
    left: dict[str, list[str]] = {}
    for full_name, param in model.named_parameters(remove_duplicate=False):
        name = original_name(full_name)
        first = first_names.setdefault(param, name)
        if param not in owned and first == name:
            left.setdefault(_why_left(name, param, embedded), []).append(name)
        elif param not in owned:
            left.setdefault(f"tied to {first}", []).append(name)
    lines = [str(dedication.plan), *_aliases(dedication)]
    lines += ["left to FSDP2 and AdamW:" if left else "nothing is left to FSDP2 and AdamW"]
    lines += [f"  {reason}: {', '.join(names)}" for reason, names in left.items()]
    frozen = [name for param, name in first_names.items() if not param.requires_grad]
    return "\n".join([*lines, *([f"frozen: {', '.join(frozen)}"] if frozen else [])])


def _aliases(dedication: Dedication) -> list[str]:
    return [
        f"{alias} is tied to {param.name}" for param in dedication.params for alias in param.aliases
    ]


def _why_left(name: str, param: nn.Parameter, embedded: set[torch.Tensor]) -> str:
    if param.ndim > 1 and param in embedded:
        return "an embedding"
    return why_not_hidden(name, param) or "the predicate did not choose it"
