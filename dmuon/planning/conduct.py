"""How a model is trained: what the planner has to be told beside its shape."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from dmuon.errors import SetupError
from dmuon.packing import Packing

Transport = Literal["reduce", "all_to_all"]


@dataclass(frozen=True)
class MeshShape:
    """A ``(replicate, shard)`` mesh; ranks are numbered row by row, a row is a replica."""

    num_replicas: int
    num_shards: int

    @property
    def size(self) -> int:
        """Number of ranks, each of which may own matrices."""
        return self.num_replicas * self.num_shards

    def __str__(self) -> str:
        return f"{self.num_replicas} x {self.num_shards}"


@dataclass(frozen=True)
class Conduct:
    """What is decided once, and how much is computed in a step.

    Attributes:
        mesh: whose ranks train.
        weight_itemsize: bytes of a weight that travels, and of its gradient as autograd makes it.
        reduce_itemsize: bytes of an element of a gradient that travels.
        reshard_after_forward: of the blocks.
        reshard_root: whether the root is freed after its forward too.
        transport: of the gradients of parcels that travel by themselves.
        packing: of blocks, as asked for.
        num_micro_batches: of a step; only the last one sends gradients.
    """

    mesh: MeshShape
    weight_itemsize: int
    reduce_itemsize: int
    reshard_after_forward: bool
    reshard_root: bool
    transport: Transport
    packing: Packing
    num_micro_batches: int

    @property
    def backend(self) -> str:
        """Of the process groups."""
        return "nccl" if self.transport == "reduce" else "gloo"

    def num_unshards_of_matrices(self, is_last: bool) -> int:
        """How often in a step those of a block are made whole.

        Args:
            is_last: no block after it has matrices.
        """
        return self.num_micro_batches * (2 if self.reshard_after_forward and not is_last else 1)

    def num_unshards(self, block: str) -> int:
        """How often in a step the symmetric parameters of a block are made whole."""
        reshards = self.reshard_after_forward if block else self.reshard_root
        return self.num_micro_batches * (2 if reshards else 1)


def read_mesh(mesh: int | tuple[int, int]) -> MeshShape:
    """A number of shards, or ``(replicas, shards)``.

    Raises:
        SetupError: for anything else.
    """
    sizes = (1, mesh) if isinstance(mesh, int) else tuple(mesh)
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise SetupError(
            f"mesh is a number of ranks or (replicate, shard), each 1 or more; got {mesh!r}"
        )
    return MeshShape(*sizes)


def itemsizes(itemsize: int, policy: MixedPrecisionPolicy | None) -> tuple[int, int]:
    """Bytes of an element of a weight that travels, and of a gradient.

    Args:
        itemsize: of the model's parameters.
        policy: as for ``dedicate_params``.
    """
    if policy is None:
        return itemsize, itemsize
    weight = _size_of(policy.param_dtype) or itemsize
    return weight, _size_of(policy.reduce_dtype) or weight


def _size_of(dtype: torch.dtype | None) -> int | None:
    return None if dtype is None else torch.empty((), dtype=dtype).itemsize
