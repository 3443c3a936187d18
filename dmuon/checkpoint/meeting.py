"""Where ranks meet while they save or load, so that what fails on one is an error on all."""

from typing import Any

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
    """The ranks of a group, also when the default group is destroyed meanwhile.

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
        everyones: list[Any] = [None] * self._group.size()
        dist.all_gather_object(everyones, mine, group=self._group)
        return everyones
