"""How the matrices that Muon orthogonalises lie in one parameter.

Letters: ``B`` matrices of one shape, ``M x N`` each; ``m x n`` a part of them.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from dmuon.errors import SetupError

Kind = Literal["matrix", "stack", "convolution"]
Part = tuple[int, int, int]


@dataclass(frozen=True)
class Split:
    """Says that a parameter is a concatenation of projections, each to be updated on its own.

    ``Split((d, d, d))`` is a fused query, key and value projection stored ``(out, in)``;
    ``Split((d, d, d), dim=1)`` the same stored ``(in, out)``, as GPT-2 does; ``Split(head_dim)``
    treats every head alone. Each part is orthogonalised alone, and its learning rate follows its
    own shape. In a stack of experts or a grouped convolution it applies to each matrix. Interleaved
    projections (every other column) are not concatenations; leave those whole.

    Attributes:
        sizes: of the parts, in order; or one number, the size of each of several equal parts.
        dim: of each matrix: 0, its rows are divided; 1, its columns.

    Raises:
        SetupError: for sizes that are not positive whole numbers, or another ``dim``.
    """

    sizes: int | tuple[int, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        sizes = (self.sizes,) if isinstance(self.sizes, int) else self.sizes
        are_whole = isinstance(sizes, list | tuple) and all(type(size) is int for size in sizes)
        if not are_whole or not sizes or min(sizes) < 1:
            raise SetupError(
                "sizes of a Split are positive whole numbers, one a part, or one number for equal "
                f"parts; got {self.sizes!r}"
            )
        if type(self.dim) is not int or self.dim not in (0, 1):
            raise SetupError(
                f"dim of a Split is 0 (rows of each matrix) or 1 (columns), got {self.dim!r}"
            )
        if not isinstance(self.sizes, int):
            object.__setattr__(self, "sizes", tuple(sizes))

    def sizes_of(self, total: int) -> tuple[int, ...]:
        """The size of each part of a dimension of ``total``; equal parts are written out."""
        if isinstance(self.sizes, int):
            return (self.sizes,) * (total // self.sizes)
        return self.sizes

    def __str__(self) -> str:
        where = "columns" if self.dim else "rows"
        sizes = f"parts of {self.sizes}" if isinstance(self.sizes, int) else _text(self.sizes)
        return f"{where} split in {sizes}"


@dataclass(frozen=True)
class Site:
    """What the module that registers a parameter says about its layout.

    Attributes:
        kind: ``"plain"``, ``"convolution"``, or ``"parametrization"`` (of ``torch.nn.utils``, which
            hides what the values are for).
        groups: of the convolution.
    """

    kind: Literal["plain", "convolution", "parametrization"] = "plain"
    groups: int = 1


PLAIN = Site()


def site_of(module: nn.Module) -> Site:
    """What ``module`` says about the layout of its own parameters."""
    if isinstance(module, _ConvNd):
        return Site("convolution", module.groups)
    return Site("parametrization") if isinstance(module, ParametrizationList) else PLAIN


@dataclass(frozen=True)
class Layout:
    """Where the matrices of one parameter are; made by ``make_layout``.

    Attributes:
        kind: ``"matrix"``: the parameter itself; ``"stack"``: each ``[e]`` of ``(E, M, N)``;
            ``"convolution"``: ``dim0 x rest``, one matrix a group. A transposed convolution is the
            adjoint of the convolution with the same weight, so it is flattened as it is stored.
        matrices: ``(B, M, N)`` before the split.
        split: how each of them is divided, with its sizes written out; None: not at all.
    """

    kind: Kind
    matrices: Part
    split: Split | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """``(B, m, n)`` of each part: ``B`` matrices of that shape are orthogonalised."""
        B, M, N = self.matrices
        if self.split is None:
            return ((B, M, N),)
        if self.split.dim == 0:
            return tuple((B, size, N) for size in self.split.sizes_of(M))
        return tuple((B, M, size) for size in self.split.sizes_of(N))

    @property
    def num_matrices(self) -> int:
        """How many matrices are orthogonalised in one update."""
        return sum(B for B, _, _ in self.parts)

    def views(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """One view ``(B, m, n)`` a part into ``tensor``, contiguous and shaped as the parameter."""
        whole_BMN = tensor.view(self.matrices)
        if self.split is None:
            return [whole_BMN]
        dim = 1 + self.split.dim
        return list(whole_BMN.split(self.split.sizes_of(self.matrices[dim]), dim))

    def __str__(self) -> str:
        B = self.matrices[0]
        text: str = self.kind
        if self.kind == "stack":
            text = f"stack of {B}"
        elif self.kind == "convolution" and B > 1:
            text = f"convolution of {B} groups"
        if self.split is not None:
            text += f", {self.split}"
        return text


def make_layout(
    name: str,
    shape: tuple[int, ...],
    sites: Collection[Site] = (PLAIN,),
    split: Split | None = None,
) -> Layout:
    """The layout of the parameter ``name``, from its shape, its modules and its declared split.

    Raises:
        SetupError: where no rule says what its matrices are, or the split does not fit.
    """
    kind, matrices = _matrices(name, tuple(shape), sites)
    if split is None:
        return Layout(kind, matrices)
    total = matrices[1 + split.dim]
    sizes = split.sizes_of(total)
    if sum(sizes) != total:
        where = "columns" if split.dim else "rows"
        raise SetupError(
            f"{name} has shape {tuple(shape)}, so each of its matrices has {total} {where}, but "
            f"sizes {split.sizes} of its Split add up to {sum(sizes)}; they must add up to {total}"
        )
    return Layout(kind, matrices, Split(sizes, split.dim) if len(sizes) > 1 else None)


def _matrices(name: str, shape: tuple[int, ...], sites: Collection[Site]) -> tuple[Kind, Part]:
    if len(shape) < 2 or 0 in shape:
        _refuse(name, shape, "Muon orthogonalises matrices, with two dimensions or more")
    if len(shape) == 2:
        return "matrix", (1, shape[0], shape[1])
    if len(set(sites)) > 1:
        _refuse(name, shape, "it is tied between modules that read it as different matrices")
    site = next(iter(sites))
    if site.kind == "parametrization":
        _refuse(name, shape, "a parametrization hides which of its dimensions make a matrix")
    if site.kind == "convolution":
        if shape[0] % site.groups:
            _refuse(name, shape, f"its first dimension is not divided by {site.groups} groups")
        return "convolution", (site.groups, shape[0] // site.groups, math.prod(shape[1:]))
    if len(shape) > 3:
        _refuse(name, shape, "outside a convolution only a stack of matrices (E, M, N) is known")
    E, M, N = shape
    return "stack", (E, M, N)


def _refuse(name: str, shape: tuple[int, ...], why: str) -> NoReturn:
    raise SetupError(
        f"{name} has shape {shape}; {why}. Leave it out of the predicate, AdamW then takes it"
    )


def _text(sizes: tuple[int, ...]) -> str:
    if len(set(sizes)) == 1:
        return f"{len(sizes)} x {sizes[0]}"
    return " + ".join(map(str, sizes))
