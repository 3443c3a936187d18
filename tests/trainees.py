"""The same training program on ranks with DMuon, and alone in float64 by the formulas.

A program is a function of a ``Trainee``. It never asks which kind it has, so whatever is written
once as a program is a comparison with one process.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from tiny import WIDTH, Block, FormulaMuon, TinyModel, is_proj, loss_of, share, tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call

import dmuon
from dmuon.packing import Packing

POLAR_EXPRESS = list(dmuon.POLAR_EXPRESS_COEFFICIENTS[:5])
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

Groups = Sequence[dict[str, Any]]


class OptionalBlock(Block):
    """With one matrix more, not contiguous as it was made, that a forward may leave out."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.extra_proj = nn.Linear(width, width, bias=False)
        self.extra_proj.weight = nn.Parameter(self.extra_proj.weight.detach().T)

    def forward(self, x_BTD: torch.Tensor, uses_extra: bool = True) -> torch.Tensor:
        x_BTD = super().forward(x_BTD)
        return x_BTD + self.extra_proj(x_BTD) if uses_extra else x_BTD


class OptionalModel(TinyModel):
    def __init__(self) -> None:
        super().__init__(num_layers=0)
        self.layers = nn.ModuleList(OptionalBlock(WIDTH, 50) for _ in range(2))
        self.uses_extra = True

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens_BT)
        for layer in self.layers:
            x = layer(x, self.uses_extra)
        return self.head(self.norm(x))


def build_optional(seed: int, frozen: Sequence[str]) -> OptionalModel:
    torch.manual_seed(seed)
    model = OptionalModel()
    for name, param in model.named_parameters():
        param.requires_grad_(name not in frozen)
    return model


class Trainee(ABC):
    """What programs may do. ``log`` collects losses, norms and rates, as they come.

    Args:
        model: to be trained.
        optimizer: with the groups of ``dmuon.Muon``.
        ranks: whose shares of each batch this process takes.
        world_size: how many ranks share a batch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: Sequence[int],
        world_size: int,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.log: list[torch.Tensor] = []
        self._ranks, self._world_size = ranks, world_size

    @abstractmethod
    def clip(self, max_norm: float) -> None:
        """And note the norm."""

    @abstractmethod
    def save(self) -> Any:
        """Model and optimizer."""

    @abstractmethod
    def load(self, saved: Any) -> None:
        """What ``save`` gave."""

    def backward(
        self,
        step: int,
        part: int = 0,
        num_parts: int = 1,
        *,
        sync: bool = True,
        uses_extra: Callable[[int], bool] = lambda rank: True,
    ) -> None:
        """Of one of ``num_parts`` micro-batches; ``uses_extra`` is asked with a rank."""
        total = torch.zeros(())
        for rank in self._ranks:
            self.model.uses_extra = uses_extra(rank)
            rows = share(tokens(step), rank, self._world_size).tensor_split(num_parts)[part]
            with nullcontext() if sync else self._no_sync():
                loss = loss_of(self._compute(), rows) / (num_parts * len(self._ranks))
                loss.backward()
            total += loss.detach()
        self.log.append(total)

    def evaluate(self) -> None:
        """The loss of a batch that is not trained on, under ``no_grad``."""
        self.model.eval()
        self.model.uses_extra = True
        with torch.no_grad():
            self.log.append(loss_of(self._compute(), tokens(999)))
        self.model.train()

    def step(self) -> None:
        self.log += [torch.tensor(float(group["lr"])) for group in self.optimizer.param_groups]
        self.optimizer.step()

    def freeze(self, names: Sequence[str], is_frozen: bool = True) -> None:
        for name, param in self.model.named_parameters():
            if name in names:
                param.requires_grad_(not is_frozen)

    def _no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _compute(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return self.model


class OnRanks(Trainee):
    """DMuon beside FSDP2 on this rank of a mesh."""

    def __init__(
        self,
        mesh: DeviceMesh,
        reshard: bool,
        groups: Groups = (),
        frozen: Sequence[str] = (),
        seed: int = 0,
        policy: MixedPrecisionPolicy | None = None,
        packing: Packing = "auto",
    ) -> None:
        model = build_optional(seed, frozen)
        dmuon.dedicate_params(
            model,
            mesh,
            predicate=is_proj,
            reshard_after_forward=reshard,
            mp_policy=policy,
            packing=packing,
        )
        shared = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy()}
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=reshard, **shared)
        fully_shard(model, **shared)
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32, param_groups=groups)
        super().__init__(model, optimizer, [dist.get_rank()], dist.get_world_size())

    def clip(self, max_norm: float) -> None:
        self.log.append(dmuon.clip_grad_norm_(self.model, max_norm))

    def save(self) -> Any:
        state = dmuon.get_model_state_dict(self.model)
        return state, dmuon.get_optimizer_state_dict(self.model, self.optimizer)

    def load(self, saved: Any) -> None:
        dmuon.set_model_state_dict(self.model, saved[0])
        dmuon.set_optimizer_state_dict(self.model, self.optimizer, saved[1])

    def _no_sync(self) -> AbstractContextManager[None]:
        return dmuon.no_sync(self.model)

    def global_log(self) -> torch.Tensor:
        """Its mean over the ranks."""
        total = torch.stack([value.float() for value in self.log])
        dist.all_reduce(total)
        return total / dist.get_world_size()


class FormulaOptimizer(torch.optim.Optimizer):
    """``FormulaMuon`` a parameter, under groups that torch's LR schedulers can drive."""

    def __init__(self, model: nn.Module, overrides: Groups) -> None:
        left = dict(model.named_parameters())
        groups: list[dict[str, Any]] = []
        for override in [*overrides, {"params": None}]:
            names = override["params"] or list(left)
            chosen = {name: left.pop(name) for name in names}
            options = {key: value for key, value in override.items() if key != "params"}
            for is_muon in (True, False):
                params = {n: p for n, p in chosen.items() if is_proj(n, p) == is_muon}
                formulas = [self._formula(name, p, options) for name, p in params.items()]
                if formulas:
                    lr = formulas[0].lr if is_muon else formulas[0].adamw_lr
                    groups.append({"params": [*params.values()], "lr": lr, "formulas": formulas})
        super().__init__(groups, {"lr": 0.02, "momentum": 0.95})

    def _formula(self, name: str, param: nn.Parameter, options: dict[str, Any]) -> FormulaMuon:
        holder = nn.Module()
        holder.param = param
        return FormulaMuon(
            holder,
            is_muon=lambda _, p: is_proj(name, p),
            coefficients=POLAR_EXPRESS,
            dtype=torch.float64,
            **options,
        )

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param, formula in zip(group["params"], group["formulas"], strict=True):
                grad = param.grad
                if grad is not None:
                    formula.lr = formula.adamw_lr = group["lr"]
                    formula.momentum = group["momentum"]
                    formula.step()
                    param.grad = grad


class Alone(Trainee):
    """One process, in float64, taking the shares of all ranks in turn.

    Args:
        world_size: how many ranks it stands for.
        groups: as for ``dmuon.Muon``.
        frozen: names.
        seed: of the model.
        compute: the dtype that forward and backward have, as with ``mp_policy``.
    """

    def __init__(
        self,
        world_size: int,
        groups: Groups = (),
        frozen: Sequence[str] = (),
        seed: int = 0,
        compute: torch.dtype = torch.float64,
    ) -> None:
        model = build_optional(seed, frozen).double()
        super().__init__(model, FormulaOptimizer(model, groups), range(world_size), world_size)
        self.start = copy.deepcopy(model.state_dict())
        self._dtype = compute

    def clip(self, max_norm: float) -> None:
        self.log.append(nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))

    def _formulas(self) -> list[FormulaMuon]:
        return [f for group in self.optimizer.param_groups for f in group["formulas"]]

    def save(self) -> Any:
        inner = [(formula.state, formula.steps) for formula in self._formulas()]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return copy.deepcopy((self.model.state_dict(), inner, rates))

    def load(self, saved: Any) -> None:
        state, inner, rates = copy.deepcopy(saved)
        self.model.load_state_dict(state)
        for formula, (values, steps) in zip(self._formulas(), inner, strict=True):
            formula.state, formula.steps = values, steps
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _compute(self) -> Callable[[torch.Tensor], torch.Tensor]:
        if self._dtype == torch.float64:
            return self.model
        cast = {name: param.to(self._dtype) for name, param in self.model.named_parameters()}
        return lambda rows: functional_call(self.model, cast, (rows,))
