"""Checks and copies that all ranks make together, so that an error is an error everywhere."""

import hashlib
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dmuon.dedication import Dedication
from dmuon.errors import SetupError, StateDictError
from dmuon.names import original_name


def gather_objects(dedication: Dedication, mine: object) -> list[Any]:
    """One small object from each rank, in the order of the owners. Collective over the mesh."""
    objects: list[Any] = [None] * dedication.owner_map.num_owners
    dist.all_gather_object(objects, mine, group=dedication.owner_map.everyone)
    return objects


def raise_together(dedication: Dedication, what: str, problems: list[str]) -> None:
    """Raise the same error on every rank when any rank has a problem. Collective over the mesh.

    Raises:
        StateDictError: listing the problems of all ranks, each once.
    """
    everyones = [line for lines in gather_objects(dedication, problems) for line in lines]
    if everyones:
        raise StateDictError(what, list(dict.fromkeys(everyones)))


def check_same_plan(dedication: Dedication, problem: Exception | None) -> None:
    """No rank may have a problem, all must hold the same plan. Collective over the mesh.

    Args:
        dedication: with its parameters and plan, on a rank without a problem.
        problem: what this rank failed with.

    Raises:
        SetupError: on every rank, naming the rank that failed or what is different where.
    """
    failures = gather_objects(
        dedication, None if problem is None else f"{type(problem).__name__}: {problem}"
    )
    if problem is not None:
        raise problem
    for rank, text in enumerate(failures):
        if text is not None:
            raise SetupError(f"rank {rank} of the mesh failed, so nothing was dedicated: {text}")
    mine = _model_lines(dedication)
    digests = gather_objects(dedication, hashlib.sha256("\n".join(mine).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    first_ranks = gather_objects(dedication, mine if dedication.owner_map.rank == 0 else None)[0]
    found = zip_longest(first_ranks, mine, fillvalue="nothing")
    here = next((f"{ours} instead of {theirs}" for theirs, ours in found if ours != theirs), None)
    differences = gather_objects(dedication, here)
    shown = "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(differences) if text)
    raise SetupError(
        "the ranks of the mesh have different models, predicates or settings, which must be equal "
        f"everywhere. First differences from rank 0: {shown}"
    )


def _model_lines(dedication: Dedication) -> list[str]:
    """Everything that must be equal on all ranks, a line each."""
    layouts = {param.name: f", dedicated as {param.layout}" for param in dedication.params}
    lines = []
    for full_name, param in dedication.model.named_parameters():
        name = original_name(full_name)
        frozen = "" if param.requires_grad else ", frozen"
        lines.append(f"{name} {list(param.shape)} {param.dtype}{frozen}{layouts.get(name, '')}")
    blocks = sorted({f"block {matrix.block!r}" for matrix in dedication.plan.matrices})
    settings = (
        f"reshard_after_forward={dedication.reshard_after_forward}, packing={dedication.packing}, "
        f"{dedication.mp_policy}"
    )
    return [*lines, *blocks, settings, f"plan {dedication.plan.digest()}"]


class Courier:
    """Brings the values of a full state dict to where they are needed.

    When every rank holds the dict nothing travels. When only the first rank does, and the others
    hold an empty one, each tensor is broadcast in turn; no rank then holds more than one extra.

    Attributes:
        described: kind, shape and dtype of every value, by name.
        problems: what keeps the ranks from loading the same, for ``raise_together``.
    """

    def __init__(self, dedication: Dedication, given: Mapping[str, Any]) -> None:
        values: dict[str, Any] = {}
        self.problems: list[str] = []
        if isinstance(given, Mapping):
            values = dict(given)
        else:  # on this rank alone, perhaps: the others must hear of it
            self.problems.append(f"a {type(given).__name__} is no dictionary of names and tensors")
        self._dedication = dedication
        self._values = values
        self.described: dict[str, Any] = {k: _describe(v) for k, v in values.items()}
        mine = hashlib.sha256(repr(sorted(self.described.items())).encode()).hexdigest()
        held = gather_objects(dedication, mine if values else "")
        self.is_needed = bool(held[0]) and len(held) > 1 and not any(held[1:])
        if self.is_needed:
            self.described = gather_objects(dedication, self.described)[0]
        elif different := [rank for rank, digest in enumerate(held) if digest != held[0]]:
            self.problems.append(
                f"ranks {different} of the mesh hold other names or shapes than rank 0; pass the "
                "same dict on every rank, or the whole one on rank 0 and {} on all others"
            )

    def fetch(self, name: str) -> Any:
        """The value called ``name``. Collective over the mesh when only one rank holds it."""
        if not self.is_needed:
            return self._values[name]
        kind, shape, dtype = self.described[name]
        group = self._dedication.owner_map.everyone
        if kind != "tensor":
            box = [self._values.get(name)]
            dist.broadcast_object_list(box, group=group, group_src=0)
            return box[0]
        value = self._values.get(name)
        if value is None:
            value = torch.empty(shape, dtype=dtype, device=self._dedication.device)
        else:
            value = value.detach().to(self._dedication.device).contiguous()
        as_bytes = value.reshape(-1).view(torch.uint8)  # backends do not know every dtype
        dist.broadcast(as_bytes, group=group, group_src=0)
        return value


def _describe(value: object) -> tuple[str, torch.Size | None, torch.dtype | None]:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}", None, None
    is_whole = not isinstance(value, DTensor) and value.layout == torch.strided
    if not is_whole or value.is_meta or value.is_quantized:
        kind = "on the meta device" if value.is_meta else f"a {value.layout} {type(value).__name__}"
        return kind, None, None
    return "tensor", value.shape, value.dtype
