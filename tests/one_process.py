"""Train any model on several ranks, wrapped as a user would, and compare with one process.

The one process computes the mean of the losses of the ranks' shares, as data-parallel training
does; for a loss that is no mean over samples, such as a load-balancing loss, this is not the loss
of the whole batch. The formulas are ``FormulaMuon``'s.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from ranks_runner import run_ranks
from tiny import FormulaMuon
from torch import nn
from torch.distributed.fsdp import fully_shard
from wrapped import global_mean, make_mesh

import dmuon

STEPS = 5
BOUND = 2e-4  # rounding alone gives up to 5e-5 after the steps, where experts are routed
ROUNDING = 5e-6  # on that error where the change itself is rounding; 5 AdamW steps are 5e-3
ADAMW_EPS = 1e-4
"""Above rounding. A gradient that is zero but for rounding (that of a key's bias: a softmax does
not see it) would otherwise become an AdamW step of full size in a direction that nobody knows."""

Batch = dict[str, torch.Tensor]


def call(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss as models of the transformers library give it."""
    return model(**batch).loss


@dataclass(frozen=True)
class Training:
    """What is trained.

    Attributes:
        make: the model before the first step; all its randomness from torch's seed.
        batch: the global batch of a step, cut along its first dimension.
        layers: what a user gives to ``fully_shard`` before the root.
        loss: of a share of a batch.
        finish: called on the wrapped model before it gets its optimizer: to fill a model from the
            meta device, or ``torch.compile``; what it returns is trained.
        alone: the same model for the one process, where it must be written in another way.
        bound: on the error of a parameter's change, relative to the change.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    layers: Callable[[Any], Iterable[nn.Module]]
    loss: Callable[[nn.Module, Batch], torch.Tensor] = call
    predicate: Callable[[str, nn.Parameter], bool] = dmuon.is_hidden_matrix
    splits: Callable[[str, nn.Parameter], dmuon.Split | None] = lambda name, param: None
    finish: Callable[[Any], nn.Module] = lambda model: model
    alone: Callable[[], nn.Module] | None = None
    bound: float = BOUND

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def build_alone(self) -> nn.Module:
        torch.manual_seed(0)
        return (self.alone or self.make)()

    def wrap(self, shape: tuple[int, ...], reshard: bool = True) -> nn.Module:
        mesh = make_mesh(*shape)
        model = self.build()
        dmuon.dedicate_params(
            model, mesh, self.predicate, splits=self.splits, reshard_after_forward=reshard
        )
        for layer in self.layers(model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        return model

    def share(self, step: int, rank: int, world_size: int) -> Batch:
        return {key: value.chunk(world_size)[rank] for key, value in self.batch(step).items()}


def assert_equals_one_process(
    training: Training, shape: tuple[int, ...], reshard: bool = True, steps: int = STEPS
) -> None:
    """The losses of all steps and all weights after them."""

    def body(rank: int) -> None:
        world_size = dist.get_world_size()
        model = training.wrap(shape, reshard)
        trained = training.finish(model)
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32, adamw_eps=ADAMW_EPS)
        losses = []
        for step in range(steps):
            loss = training.loss(trained, training.share(step, rank, world_size))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(global_mean(loss.detach()))
        state = dmuon.get_model_state_dict(model)
        if rank == 0:
            dedicated = set(dmuon.get_dedicated_params(model))
            _compare(training, world_size, dedicated, losses, state)

    training.build()  # imports what it needs here, once for all forked ranks
    run_ranks(math.prod(shape), body)


def _compare(
    training: Training,
    world_size: int,
    dedicated: set[str],
    losses: list[float],
    state: dict[str, torch.Tensor],
) -> None:
    alone = training.build_alone()

    def split(name: str, param: nn.Parameter) -> tuple[tuple[int, ...], int] | None:
        declared = training.splits(name, param)
        return (
            None
            if declared is None
            else (declared.sizes_of(param.shape[declared.dim - 2]), declared.dim)
        )

    formula = FormulaMuon(
        alone,
        split=split,
        is_muon=lambda name, param: name in dedicated,
        coefficients=list(dmuon.POLAR_EXPRESS_COEFFICIENTS[:5]),
        adamw_eps=ADAMW_EPS,
    )
    expected, has_gradient = [], set()
    for step in range(len(losses)):
        total = 0.0
        for rank in range(world_size):
            loss = training.loss(alone, training.share(step, rank, world_size)) / world_size
            loss.backward()
            total += loss.item()
        expected.append(total)
        has_gradient |= {name for name, p in alone.named_parameters() if p.grad is not None}
        formula.step()
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-6)
    assert list(state) == list(alone.state_dict())
    start = training.build_alone().state_dict()
    wrong = []
    for name, value in alone.state_dict().items():
        change, off = (value - start[name]).norm(), (state[name] - value).norm()
        if name in has_gradient and not change > 0:
            wrong.append(f"{name} has a gradient and did not change")
        low = 0.0 if state[name].dtype == value.dtype else value.norm() * 2**-8  # given as bfloat16
        if not off <= training.bound * change + ROUNDING + low:
            wrong.append(f"{name} changed by {change:.2e}, off by {off:.2e}")
    assert not wrong, "\n".join(wrong)
    assert dedicated & has_gradient, "no hidden matrix was trained"
