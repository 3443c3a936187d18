"""Checks and copies that all ranks make together, so that an error is an error everywhere."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from dmuon.dedication import Dedication
from dmuon.errors import StateDictError


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


class Courier:
    """Brings the values of a full state dict to where they are needed.

    When every rank holds the dict nothing travels. When only the first rank does, and the others
    hold an empty one, each tensor is broadcast in turn; no rank then holds more than one extra.

    Attributes:
        described: kind, shape and dtype of every value, by name.
        problems: what keeps the ranks from loading the same, for ``raise_together``.
    """

    def __init__(self, dedication: Dedication, values: dict[str, Any]) -> None:
        self._dedication = dedication
        self._values = values
        self.problems: list[str] = []
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
        dist.broadcast(value, group=group, group_src=0)
        return value


def _describe(value: object) -> tuple[str, torch.Size | None, torch.dtype | None]:
    if isinstance(value, torch.Tensor):
        return "tensor", value.shape, value.dtype
    return "object", None, None
