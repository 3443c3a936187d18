"""What the planner knows of a model: its blocks, what is dedicated in them, and what is not."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import nn

from dmuon.boundaries import Boundaries, Boundary, blocks_of
from dmuon.errors import SetupError
from dmuon.partition import Matrix
from dmuon.selection import Predicate, Splits, embedding_weights, select


@dataclass(frozen=True)
class SymmetricParam:
    """A parameter that FSDP2 shards by its first dimension.

    Attributes:
        name: in the model.
        shape: whole.
        is_looked_up: an embedding that is nothing else, so that its gradient comes last.
    """

    name: str
    shape: tuple[int, ...]
    is_looked_up: bool = False

    def padded(self, num_shards: int) -> int:
        """Elements on all shards together, each as large as the first, as FSDP2 pads them."""
        return num_shards * self.first_shard(num_shards)

    def first_shard(self, num_shards: int) -> int:
        """Elements of the largest shard, which all others are padded to."""
        return _first_shard(self.shape, num_shards)


@lru_cache(maxsize=4096)  # models have few shapes, and are asked for them again and again
def _first_shard(shape: tuple[int, ...], num_shards: int) -> int:
    rows, *rest = shape or (1,)
    return -(-rows // num_shards) * math.prod(rest)


@dataclass(frozen=True)
class BlockShape:
    """What one module given to ``fully_shard`` makes whole and frees together.

    Attributes:
        name: of the module; "" is the root, which holds what is in no other.
        matrices: its dedicated parameters.
        symmetric: all others.
    """

    name: str
    matrices: tuple[Matrix, ...]
    symmetric: tuple[SymmetricParam, ...]

    @cached_property
    def dedicated_numel(self) -> int:
        """Elements of its matrices."""
        return sum(matrix.numel for matrix in self.matrices)

    @cached_property
    def longest_matrix(self) -> int:
        """Elements of the largest of them."""
        return max((matrix.numel for matrix in self.matrices), default=0)

    @cached_property
    def symmetric_numel(self) -> int:
        """Elements of its symmetric parameters."""
        return sum(param.padded(1) for param in self.symmetric)

    @cached_property
    def looked_up_numel(self) -> int:
        """Elements of those that are looked up."""
        return sum(param.padded(1) for param in self.symmetric if param.is_looked_up)

    def padded(self, num_shards: int) -> int:
        """Elements of its symmetric parameters on all shards, with their padding."""
        return sum(param.padded(num_shards) for param in self.symmetric)


@dataclass(frozen=True)
class ModelShape:
    """A model as the planner sees it.

    Attributes:
        blocks: in the order of the model, which is that of the forward; the root comes first.
        itemsize: bytes of an element of its parameters.
        buffer_bytes: of what it keeps beside parameters.
    """

    blocks: tuple[BlockShape, ...]
    itemsize: int
    buffer_bytes: int

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """All dedicated parameters, in the order of the blocks."""
        return tuple(matrix for block in self.blocks for matrix in block.matrices)

    @property
    def last_with_matrices(self) -> int | None:
        """Place of the last block that has any."""
        return max((i for i, block in enumerate(self.blocks) if block.matrices), default=None)

    @property
    def symmetric(self) -> tuple[SymmetricParam, ...]:
        """All others."""
        return tuple(param for block in self.blocks for param in block.symmetric)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        symmetric = sum(math.prod(param.shape) for param in self.symmetric)
        return symmetric + sum(block.dedicated_numel for block in self.blocks)

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward: 6 a weight that multiplies (Kaplan et al. 2020, 2001.08361)."""
        multiplying = self.numel - sum(
            math.prod(param.shape) for param in self.symmetric if param.is_looked_up
        )
        return 6.0 * multiplying

    def without_owners(self) -> "ModelShape":
        """The same model when FSDP2 shards everything, for AdamW."""
        blocks = (
            BlockShape(
                block.name,
                (),
                (*(SymmetricParam(m.name, m.shape) for m in block.matrices), *block.symmetric),
            )
            for block in self.blocks
        )
        return ModelShape(tuple(blocks), self.itemsize, self.buffer_bytes)


def read_shape(
    model: nn.Module, predicate: Predicate, splits: Splits | None, boundary: Boundary | None
) -> ModelShape:
    """Read a model, which may be on the meta device and is left as it is.

    Args:
        model: before ``dedicate_params``.
        predicate: as of ``dedicate_params``.
        splits: likewise.
        boundary: which modules will be given to ``fully_shard``; the root is in any case.

    Raises:
        SetupError: as ``dedicate_params``; or for parameters of several dtypes.
    """
    params = select(model, predicate, splits)
    boundaries = Boundaries(model, boundary)
    matrices: dict[str, list[Matrix]] = {}
    for param, block in zip(params, blocks_of(params, boundaries), strict=True):
        matrix = Matrix(param.name, tuple(param.shape), block, param.layout)
        matrices.setdefault(block, []).append(matrix)
    symmetric: dict[str, list[SymmetricParam]] = {}
    dedicated = {param.param for param in params}
    embeddings = embedding_weights(module for _, module in boundaries.modules)
    for block, shard in _symmetric(boundaries, dedicated, embeddings):
        symmetric.setdefault(block, []).append(shard)
    blocks = (
        BlockShape(name, tuple(matrices.get(name, ())), tuple(symmetric.get(name, ())))
        for name, _ in boundaries.modules
        if name in matrices or name in symmetric
    )
    buffers = {
        b for _, module in boundaries.modules for b in module._buffers.values() if b is not None
    }
    return ModelShape(tuple(blocks), _itemsize(boundaries), sum(b.nbytes for b in buffers))


def _symmetric(
    boundaries: Boundaries, dedicated: set[nn.Parameter], embeddings: set[torch.Tensor]
) -> Iterator[tuple[str, SymmetricParam]]:
    sites: dict[nn.Parameter, set[tuple[nn.Module, str]]] = {}
    first: dict[nn.Parameter, tuple[str, str]] = {}
    for module_name, module in boundaries.modules:
        for attribute, param in module._parameters.items():
            if param is not None and param not in dedicated:
                sites.setdefault(param, set()).add((module, attribute))
                first.setdefault(param, (module_name, attribute))
    for param, (module_name, attribute) in first.items():
        name = f"{module_name}.{attribute}" if module_name else attribute
        is_looked_up = param in embeddings and len(sites[param]) == 1
        yield (
            boundaries.of(module_name),
            SymmetricParam(name, tuple(param.shape), is_looked_up),
        )


def _itemsize(boundaries: Boundaries) -> int:
    params = (p for _, module in boundaries.modules for p in module._parameters.values())
    dtypes = {param.dtype for param in params if param is not None}
    if len(dtypes) != 1:
        raise SetupError(
            f"the parameters of this model have {sorted(map(str, dtypes))}; a plan knows one "
            "dtype, so convert the model first: model.float()"
        )
    return dtypes.pop().itemsize
