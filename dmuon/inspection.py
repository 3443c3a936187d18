"""Looking at what is dedicated, to whom, and what has been done."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from dmuon import dedication as dedications
from dmuon.counters import Counters
from dmuon.dedication import Dedication
from dmuon.errors import SetupError
from dmuon.names import original_name
from dmuon.optimizer import Muon
from dmuon.selection import embedding_weights, why_not_hidden
from dmuon.update_statistics import UpdateStatistics, UpdateWatch


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
    if owner not in range(dedication.owner_map.num_owners):
        raise ValueError(
            f"rank must be in [0, {dedication.owner_map.num_owners}), the ranks of the mesh, "
            f"got {rank!r}"
        )
    return {param.name: param.param for param in dedication.params if param.owner == owner}


def get_counters(model: nn.Module) -> Counters:
    """What this rank has done for dedicated parameters so far; the object goes on counting."""
    return dedications.of(model).engine.counters


@contextmanager
def watch_updates(optimizer: Muon) -> Iterator[dict[str, UpdateStatistics]]:
    """Look at the updates of the step inside the block, of the matrices that this rank owns.

    ``with dmuon.watch_updates(optimizer) as updates: optimizer.step()``. The dictionary is filled
    at the end of the block: by name of the parameter, with ``[e]`` for matrix ``e`` of a stack or
    group ``e`` of a convolution, and ``:p`` for part ``p`` of a split. Each matrix of the model
    that was updated is there on exactly one rank. After several steps the newest counts.

    Local: no collective. Training goes on with the same bits. It costs one matrix product more for
    the 15 of an update, eigenvalues of small matrices, and one wait for the device.

    Raises:
        SetupError: for another optimizer, or inside another such block.
    """
    if not isinstance(optimizer, Muon):
        raise SetupError(
            f"watch_updates takes a dmuon.Muon, not {type(optimizer).__name__}: "
            "with dmuon.watch_updates(optimizer)"
        )
    if optimizer.update_watch is not None:
        raise SetupError(
            "the updates of this optimizer are watched already; leave that block of watch_updates "
            "first"
        )
    updates: dict[str, UpdateStatistics] = {}
    optimizer.update_watch = watch = UpdateWatch()
    try:
        yield updates
    finally:
        optimizer.update_watch = None
    updates.update(watch.result())


def describe(model: nn.Module) -> str:
    """Who owns what, and why AdamW takes the rest, as text. Local: no collective.

    A table of the dedicated parameters (owner, shape, Newton-Schulz work and bytes, and what they
    hold where that is more than one matrix), the totals of every owner, after the first use of the
    model how its blocks travel, and the names of all other parameters below the reason why they are
    not dedicated. Frozen parameters are listed last: they are not updated while they are frozen.
    """
    dedication = dedications.of(model)
    owned = {param.param for param in dedication.params}
    embedded = embedding_weights(model.modules())
    first_names: dict[nn.Parameter, str] = {}
    left: dict[str, list[str]] = {}
    for full_name, param in model.named_parameters(remove_duplicate=False):
        name = original_name(full_name)
        first = first_names.setdefault(param, name)
        if param not in owned and first == name:
            left.setdefault(_why_left(name, param, embedded), []).append(name)
        elif param not in owned:
            left.setdefault(f"tied to {first}", []).append(name)
    lines = [str(dedication.plan), *_aliases(dedication), *_packing(dedication)]
    lines += ["left to FSDP2 and AdamW:" if left else "nothing is left to FSDP2 and AdamW"]
    lines += [f"  {reason}: {', '.join(names)}" for reason, names in left.items()]
    frozen = [name for param, name in first_names.items() if not param.requires_grad]
    return "\n".join([*lines, *([f"frozen: {', '.join(frozen)}"] if frozen else [])])


def _aliases(dedication: Dedication) -> list[str]:
    return [
        f"{alias} is tied to {param.name}" for param in dedication.params for alias in param.aliases
    ]


def _packing(dedication: Dedication) -> list[str]:
    blocks = dedication.engine.blocks if dedication.has_started else []
    if not blocks:
        return []
    num_whole = sum(block.carrier.packing == "block" for block in blocks)
    return [f"{num_whole} of {len(blocks)} blocks travel whole (packing={dedication.packing!r})"]


def _why_left(name: str, param: nn.Parameter, embedded: set[torch.Tensor]) -> str:
    if param.ndim > 1 and param in embedded:
        return "an embedding"
    return why_not_hidden(name, param) or "the predicate did not choose it"
