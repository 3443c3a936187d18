"""One case of the fuzz test: a random model, mesh, settings and order of calls, and its answer."""

import random
from contextlib import nullcontext
from dataclasses import dataclass

import fuzz_models
import torch
import torch.distributed as dist
from fuzz_models import Shape, batch, loss_of, split_of
from tiny import FormulaMuon
from torch import nn
from torch.distributed.fsdp import fully_shard
from wrapped import make_mesh

import dmuon
from dmuon.packing import Packing

BATCH = 72  # divisible by every world size times every number of micro-batches
# What float32 alone does to one process, times this, is no fault: some cases are ill-conditioned,
# and another order of summation is another rounding.
ROUNDING = 30
CLASSIC = (3.4445, -4.7750, 2.0315)
MESHES = {1: [(1,)], 2: [(2,), (1, 2), (2, 1)], 3: [(3,)], 4: [(4,), (2, 2), (4, 1), (1, 4)]}


@dataclass(frozen=True)
class Step:
    """What happens in one step, in this order."""

    micro_batches: int
    without_sync: bool
    max_norm: float | None
    is_skipped: bool  # zero_grad instead of a step
    is_doubled: bool  # two steps with the same gradients
    evaluates: tuple[bool, bool, bool]  # before, between backward and step, after
    reloads: bool  # both state dicts are taken and set again


@dataclass(frozen=True)
class Case:
    """Everything that a seed decides."""

    seed: int
    shape: Shape
    mesh: tuple[int, ...]
    reshard: bool
    is_async: bool
    packing: Packing
    wraps_layers: bool
    settings: dict[str, object]
    steps: tuple[Step, ...]

    @staticmethod
    def draw(seed: int, world_size: int) -> "Case":
        rng = random.Random(f"{seed} {world_size}")
        return Case(
            seed=seed,
            shape=Shape.draw(rng),
            mesh=rng.choice(MESHES[world_size]),
            reshard=rng.random() < 0.6,
            is_async=rng.random() < 0.7,
            # drawn apart, so that seeds that failed once stay the cases that they were
            packing=random.Random(f"packing {seed}").choice(("owner", "block")),
            wraps_layers=rng.random() < 0.7,
            settings={
                "lr": rng.choice((0.02, 0.005)),
                "momentum": rng.choice((0.0, 0.9, 0.95)),
                "nesterov": rng.random() < 0.5,
                "weight_decay": rng.choice((0.0, 0.1)),
                "adjust_lr_fn": rng.choice(("match_rms_adamw", "original", None)),
                "ns_steps": rng.randint(1, 5),
                "ns_coefficients": rng.choice((dmuon.POLAR_EXPRESS_COEFFICIENTS, CLASSIC)),
                # some gradients are zero but for rounding (the bias of keys); a larger eps keeps
                # AdamW from making whole steps of that
                "adamw_eps": 1e-3,
                "adamw_weight_decay": rng.choice((0.0, 0.1)),
            },
            steps=tuple(_draw_step(rng) for _ in range(rng.randint(1, 4))),
        )


def _draw_step(rng: random.Random) -> Step:
    return Step(
        micro_batches=rng.choice((1, 1, 2, 3)),
        without_sync=rng.random() < 0.5,
        max_norm=rng.choice((None, 0.01, 1.0, float("inf"))),
        is_skipped=rng.random() < 0.15,
        is_doubled=rng.random() < 0.1,
        evaluates=(rng.random() < 0.3, rng.random() < 0.3, rng.random() < 0.3),
        reloads=rng.random() < 0.2,
    )


class PartsMuon(FormulaMuon):
    """The formula, on each matrix of a stack, a convolution or a declared split by itself."""

    def _muon(self, name: str, W: nn.Parameter, grad: torch.Tensor) -> None:
        for number, (w, g) in enumerate(zip(_parts(name, W), _parts(name, grad), strict=True)):
            super()._muon(f"{name} {number}", w, g)


def _parts(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    if "experts" in name:
        return list(tensor.unbind(0))
    if tensor.ndim == 3:
        return [tensor.flatten(1)]
    return list(tensor.chunk(3)) if split_of(name, tensor) is not None else [tensor]


def check(case: Case) -> None:
    """Train the case on all ranks and in one process. Collective over the default group.

    Raises:
        AssertionError: naming what differs.
    """
    model, optimizer = _prepare(case)
    dedicated = set(dmuon.get_dedicated_params(model))
    exact, exact_seen = _train_alone(case, dedicated, torch.float64)
    rounded, rounded_seen = _train_alone(case, dedicated, torch.float32)
    for number, step in enumerate(case.steps):
        for what, value in _step(case, number, step, model, optimizer).items():
            key = f"{what} of step {number}"
            allowed = 1e-3 * abs(exact_seen[key]) + 1e-5
            allowed += ROUNDING * abs(rounded_seen[key] - exact_seen[key])
            assert abs(value - exact_seen[key]) <= allowed, f"{key}: {value}, not {exact_seen[key]}"
    start = fuzz_models.build(case.shape, case.seed).state_dict()
    state = dmuon.get_model_state_dict(model)
    assert list(state) == list(start)
    for name, value in exact.state_dict().items():
        change, off = float((value - start[name]).norm()), float((state[name] - value).norm())
        rounding = float((rounded.state_dict()[name] - value).norm())
        is_close = off <= 1e-3 * change + 1e-6 + ROUNDING * rounding
        assert is_close, (
            f"{name}: changed by {change:.3g}, off by {off:.3g}, float32 {rounding:.3g}"
        )
    expected = sum(
        (1 + step.is_doubled) * _num_matrices(exact, dedicated)
        for step in case.steps
        if not step.is_skipped
    )
    total = torch.tensor(dmuon.get_counters(model).newton_schulz)
    dist.all_reduce(total)
    assert int(total) == expected, f"{int(total)} Newton-Schulz runs instead of {expected}"


def _num_matrices(alone: nn.Module, dedicated: set[str]) -> int:
    """Of the dedicated parameters that are used and trained."""
    used = {f"layers.{index}." for index in alone.shape.order}
    return sum(
        len(_parts(name, param))
        for name, param in alone.named_parameters()
        if name in dedicated
        and param.requires_grad
        and (not name.startswith("layers.") or any(name.startswith(each) for each in used))
    )


def _train_alone(
    case: Case, dedicated: set[str], dtype: torch.dtype
) -> tuple[nn.Module, dict[str, float]]:
    alone = fuzz_models.build(case.shape, case.seed).to(dtype)
    formula = _formula(case, alone, dedicated)
    seen: dict[str, float] = {}
    for number, step in enumerate(case.steps):
        for what, value in _step_alone(case, number, step, alone, formula).items():
            seen[f"{what} of step {number}"] = value
    return alone, seen


def _prepare(case: Case) -> tuple[nn.Module, dmuon.Muon]:
    mesh = make_mesh(*case.mesh)
    model = fuzz_models.build(case.shape, case.seed)
    dmuon.dedicate_params(
        model,
        mesh,
        lambda name, param: param.ndim > 1 and "norm" not in name,
        reshard_after_forward=case.reshard,
        splits=split_of,
        packing=case.packing,
    )
    for layer in model.layers if case.wraps_layers else ():
        fully_shard(layer, mesh=mesh, reshard_after_forward=case.reshard)
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(
        model, **case.settings, ns_dtype=torch.float32, replicate_async=case.is_async
    )
    return model, optimizer


def _formula(case: Case, alone: nn.Module, dedicated: set[str]) -> PartsMuon:
    settings = dict(case.settings)
    steps = settings.pop("ns_steps")
    coefficients = settings.pop("ns_coefficients")
    per_step = [coefficients] * steps if coefficients == CLASSIC else list(coefficients[:steps])
    settings["adjust"] = settings.pop("adjust_lr_fn")
    return PartsMuon(
        alone,
        is_muon=lambda name, _: name in dedicated,
        coefficients=per_step,
        dtype=next(alone.parameters()).dtype,
        **settings,
    )


def _step(
    case: Case, number: int, step: Step, model: nn.Module, optimizer: dmuon.Muon
) -> dict[str, float]:
    x, y = batch(case.seed, number, BATCH)
    seen: dict[str, float] = {}

    def evaluate(place: int) -> None:
        if step.evaluates[place]:
            with torch.no_grad():
                seen[f"evaluation {place}"] = float(loss_of(model.eval(), x, y))
            model.train()

    evaluate(0)
    _backward(step, model, x, y)
    evaluate(1)
    if step.max_norm is not None:
        seen["norm"] = float(dmuon.clip_grad_norm_(optimizer, step.max_norm))
    for _ in range(0 if step.is_skipped else 1 + step.is_doubled):
        optimizer.step()
    (model if step.is_skipped else optimizer).zero_grad()
    if step.reloads:
        dmuon.set_model_state_dict(model, dmuon.get_model_state_dict(model))
        state = dmuon.get_optimizer_state_dict(model, optimizer)
        dmuon.set_optimizer_state_dict(model, optimizer, state)
    evaluate(2)
    return seen


def _backward(step: Step, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """This rank's share of each micro-batch; only the last one sends, or each does."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for index in range(step.micro_batches):
        parts = (t.chunk(step.micro_batches)[index].chunk(world_size)[rank] for t in (x, y))
        is_last = index == step.micro_batches - 1
        with dmuon.no_sync(model) if step.without_sync and not is_last else nullcontext():
            (loss_of(model, *parts) / step.micro_batches).backward()


def _step_alone(
    case: Case, number: int, step: Step, alone: nn.Module, formula: PartsMuon
) -> dict[str, float]:
    dtype = next(alone.parameters()).dtype
    x, y = (t.to(dtype) for t in batch(case.seed, number, BATCH))
    seen: dict[str, float] = {}

    def evaluate(place: int) -> None:
        if step.evaluates[place]:
            with torch.no_grad():
                seen[f"evaluation {place}"] = float(loss_of(alone, x, y))

    evaluate(0)
    loss_of(alone, x, y).backward()
    evaluate(1)
    if step.max_norm is not None:
        seen["norm"] = float(nn.utils.clip_grad_norm_(alone.parameters(), step.max_norm))
    grads = {name: param.grad for name, param in alone.named_parameters()}
    for _ in range(0 if step.is_skipped else 1 + step.is_doubled):
        for name, param in alone.named_parameters():
            param.grad = grads[name]
        formula.step()
    alone.zero_grad()
    evaluate(2)
    return seen
