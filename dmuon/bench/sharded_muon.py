"""Muon on the shards of ``fully_shard``, two ways: what DMuon is compared with.

Weights and momentum stay sharded by rows, so a whole matrix has to be brought together in every
step. The arithmetic is DMuon's own, so that distribution alone differs.
"""

from collections.abc import Mapping
from typing import Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dmuon import is_hidden_matrix
from dmuon.adamw import adamw_
from dmuon.batching import orthogonalize_all
from dmuon.cuda_graphs import make_workspace
from dmuon.muon_update import lr_scale
from dmuon.newton_schulz import Coefficients, coefficient_schedule
from dmuon.partition import Matrix, make_plan

_MOMENTUM = 0.95
_NS_STEPS = 5
_EPS = 1e-7


def hidden_and_rest(model: nn.Module) -> tuple[dict[str, DTensor], list[nn.Parameter]]:
    """The hidden matrices by name, and what is left to AdamW."""
    hidden: dict[str, DTensor] = {}
    rest = []
    for name, param in model.named_parameters():
        if is_hidden_matrix(name, param):
            assert isinstance(param, DTensor)
            hidden[name] = param
        else:
            rest.append(param)
    return hidden, rest


class ShardedMuon(torch.optim.Optimizer):
    """Momentum on the shards, matrices orthogonalised by a subclass, AdamW for the rest."""

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        adamw_lr: float,
        coefficients: Coefficients,
        ns_dtype: torch.dtype,
    ) -> None:
        self._hidden, rest = hidden_and_rest(model)
        self._lr = lr
        self._adamw = torch.optim.AdamW(rest, lr=adamw_lr)
        super().__init__([*self._hidden.values(), *rest], {})
        first = next(iter(self._hidden.values()))
        self._group = first.device_mesh.get_group()
        self._rank, self._num_ranks = self._group.rank(), self._group.size()
        self._shards = [param.to_local() for param in self._hidden.values()]
        self._momenta = [torch.zeros_like(shard) for shard in self._shards]
        self._workspace = make_workspace(first.device)
        self._dtype = ns_dtype
        self._schedule = coefficient_schedule(coefficients, _NS_STEPS)
        self._prepare()

    def _prepare(self) -> None:
        """What a subclass works out once, at set-up."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """One step of everything. Collective over the mesh of the shards."""
        grads = [_local_grad(param) for param in self._hidden.values()]
        torch._foreach_mul_(self._momenta, _MOMENTUM)
        torch._foreach_add_(self._momenta, grads)
        updates = torch._foreach_add(grads, self._momenta, alpha=_MOMENTUM)
        orthogonal = self._orthogonalize([update.to(self._dtype) for update in updates])
        for param, shard, rows in zip(self._hidden.values(), self._shards, orthogonal, strict=True):
            scale = lr_scale(param.shape, "match_rms_adamw")
            shard.add_(rows, alpha=-self._lr * scale)
        adamw_(self._adamw.param_groups[0], self._adamw.state)

    def _orthogonalize(self, updates: list[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's rows of every matrix, orthogonalised. Collective."""
        raise NotImplementedError

    def _newton_schulz(self, matrices: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of whole matrices, batched by shape as DMuon does."""
        stacks = [
            _Whole(matrix.unsqueeze(0), torch.empty_like(matrix[None])) for matrix in matrices
        ]
        orthogonalize_all(stacks, self._workspace, self._schedule, dtype=self._dtype, eps=_EPS)
        return [stack.result[0] for stack in stacks]

    def _rows(self, shape: torch.Size, rank: int) -> slice:
        """Of a matrix, those on ``rank``, as ``torch.chunk`` and ``fully_shard`` divide them."""
        most = -(-shape[0] // self._num_ranks)
        return slice(min(rank * most, shape[0]), min((rank + 1) * most, shape[0]))


def _local_grad(param: DTensor) -> torch.Tensor:
    grad = param.grad
    assert isinstance(grad, DTensor)
    return grad.to_local()


class GatheringMuon(ShardedMuon):
    """Every rank gathers every matrix and orthogonalises all of them."""

    def _orthogonalize(self, updates: list[torch.Tensor]) -> list[torch.Tensor]:
        whole = [
            DTensor.from_local(
                update,
                param.device_mesh,
                param.placements,
                run_check=False,
                shape=param.shape,
                stride=param.stride(),
            ).full_tensor()
            for param, update in zip(self._hidden.values(), updates, strict=True)
        ]
        return [each[self._rows(each.shape, self._rank)] for each in self._newton_schulz(whole)]


class ExchangingMuon(ShardedMuon):
    """Every matrix has an owner that orthogonalises it; two packed all-to-all bring it and back.

    The owners are those of DMuon's plan. It is the strong baseline: of what starts in the step,
    nothing moves or computes less.
    """

    def _prepare(self) -> None:
        names = list(self._hidden)
        shapes = [self._hidden[name].shape for name in names]
        matrices = [
            Matrix(name, tuple(shape), block=name.rpartition(".")[0])
            for name, shape in zip(names, shapes, strict=True)
        ]
        owners = make_plan(matrices, self._num_ranks).owners
        self._owned_by = [
            [index for index, owner in enumerate(owners) if owner == rank]
            for rank in range(self._num_ranks)
        ]
        self._shapes = shapes

    def _orthogonalize(self, updates: list[torch.Tensor]) -> list[torch.Tensor]:
        mine = self._owned_by[self._rank]
        # to owners: my rows of each of their matrices; from ranks: their rows of mine
        to_owners = [[updates[index] for index in owned] for owned in self._owned_by]
        arriving = [
            [updates[0].new_empty(self._shape_on(index, rank)) for index in mine]
            for rank in range(self._num_ranks)
        ]
        pieces = self._exchange(to_owners, arriving)
        done = self._newton_schulz([torch.cat(parts) for parts in zip(*pieces, strict=True)])
        to_ranks = [
            [matrix[self._rows(matrix.shape, rank)] for matrix in done]
            for rank in range(self._num_ranks)
        ]
        returning = self._exchange(to_ranks, to_owners)
        rows: Mapping[int, torch.Tensor] = {
            index: piece
            for owned, pieces in zip(self._owned_by, returning, strict=True)
            for index, piece in zip(owned, pieces, strict=True)
        }
        return [rows[index] for index in range(len(updates))]

    def _shape_on(self, index: int, rank: int) -> tuple[int, int]:
        rows = self._rows(self._shapes[index], rank)
        return rows.stop - rows.start, self._shapes[index][1]

    def _exchange(
        self, sent: list[list[torch.Tensor]], like: list[list[torch.Tensor]]
    ) -> list[list[torch.Tensor]]:
        """By rank, what it sent here, of the shapes of ``like``; one all-to-all."""
        packed = torch.cat([piece.reshape(-1) for pieces in sent for piece in pieces])
        sizes = [sum(piece.numel() for piece in pieces) for pieces in sent]
        expected = [sum(piece.numel() for piece in pieces) for pieces in like]
        arrived = packed.new_empty(sum(expected))
        dist.all_to_all_single(arrived, packed, expected, sizes, group=self._group)
        return [
            [
                part.view(piece.shape)
                for part, piece in zip(
                    flat.split([piece.numel() for piece in pieces]), pieces, strict=True
                )
            ]
            for flat, pieces in zip(arrived.split(expected), like, strict=True)
        ]


class _Whole:
    """Matrices of one shape, and where their results go."""

    def __init__(self, matrices_BMN: torch.Tensor, result_BMN: torch.Tensor) -> None:
        self._matrices = matrices_BMN
        self.result = result_BMN

    @property
    def shape(self) -> torch.Size:
        return self._matrices.shape

    def split_at(self, count: int) -> tuple[Self, Self]:
        first, second = (
            type(self)(self._matrices[some], self.result[some])
            for some in (slice(count), slice(count, None))
        )
        return first, second

    def write_to(self, room_BMN: torch.Tensor) -> None:
        room_BMN.copy_(self._matrices)

    def take(self, orthogonal_BMN: torch.Tensor) -> None:
        self.result.copy_(orthogonal_BMN)
