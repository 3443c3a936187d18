"""Where ranks meet while they save or load, so that what fails on one is an error on all."""

import pickle
from typing import Any

import torch
import torch.distributed as dist

from dmuon.agreement import gather_objects
from dmuon.dedication import Dedication


def tell_all(dedication: Dedication, mine: object) -> list[Any]:
    """One small object from each rank, in the order of the mesh. Collective over the mesh.

    Raises:
        CollectiveError: a rank has failed, or is stuck.
    """
    with dedication.engine.order.explained("agreeing on a checkpoint"):
        return gather_objects(dedication, mine)


class Meeting:
    """The ranks of a group, as long as this object lives.

    ``torch.distributed.all_gather_object`` refuses once the default group is destroyed, which a
    training script does at its end while a save may still go on beside it; the group itself works
    on.

    Args:
        group: a CPU group that nothing else uses meanwhile; None for one rank alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else group.rank()

    def tell_all(self, mine: object) -> list[Any]:
        """One small object from each rank. Collective over the group.

        Raises:
            RuntimeError: a rank is gone.
        """
        if self._group is None:
            return [mine]
        data = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        sizes = [int(size) for size in self._gather(torch.tensor([len(data)]))]
        padded = data.new_zeros(max(sizes))
        padded[: len(data)] = data
        parts = zip(self._gather(padded), sizes, strict=True)
        return [pickle.loads(part[:size].numpy().tobytes()) for part, size in parts]

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        assert self._group is not None
        everyones = [torch.empty_like(mine) for _ in range(self._group.size())]
        self._group.allgather([everyones], [mine]).wait()
        return everyones
