"""Where ranks meet while they save or load, so that what fails on one is an error on all."""

import pickle
from collections import deque
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


_kept: deque[dist.Work] = deque(maxlen=4)
"""The newest collectives of meetings.

A thread of gloo lets go of a collective a moment after it has woken those who wait for it. Were it
the last, it would free the tensors, for which it needs Python; a process that ends at that moment
aborts.
"""


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
        text = pickle.dumps(mine)
        sizes = [int(size) for size in _gather(self._group, torch.tensor([len(text)]))]
        padded = bytearray(text.ljust(max(sizes), b"\0"))
        parts = _gather(self._group, torch.frombuffer(padded, dtype=torch.uint8))
        texts = [bytes(part[:size].numpy()) for part, size in zip(parts, sizes, strict=True)]
        return [pickle.loads(each) for each in texts]


def _gather(group: dist.ProcessGroup, mine: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    work = dist.all_gather(parts, mine, group=group, async_op=True)
    assert work is not None
    work.wait()
    _kept.append(work)
    return parts
