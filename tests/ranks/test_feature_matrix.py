"""What people combine in a training script, each combination against one process in float64."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact import assert_follows, assert_identical
from ranks_runner import run_ranks
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler
from trainees import BFLOAT16, Alone, OnRanks, Trainee, build_optional
from wrapped import make_mesh

import dmuon
from dmuon.packing import Packing

# AdamW moves by g / (|g| + eps): with eps of the size of gradients it feels their scale, and does
# not turn the float32 noise of a gradient near 0 into a step of full length
SMOOTH = (
    {
        "params": [n for n, _ in build_optional(0, ()).named_parameters()],
        "adamw_lr": 0.05,
        "adamw_eps": 1e-2,
    },
)
FROZEN = ("layers.0.up_proj.weight", "layers.1.q_proj.weight", "layers.0.norm1.bias")
GROUPS = (
    {
        "params": ["layers.1.down_proj.weight", "head.weight", "layers.0.q_proj.weight"],
        "lr": 0.03,
        "weight_decay": 0.2,
        "adamw_lr": 2e-3,
        "adamw_weight_decay": 0.1,
    },
    {"params": ["layers.1.q_proj.weight", "layers.0.up_proj.weight"], "lr": 0.01},
)

Program = Callable[[Trainee], None]


def one_step(
    t: Trainee,
    step: int,
    *,
    num_parts: int = 1,
    no_sync: bool = False,
    max_norm: float | None = None,
    set_to_none: bool = True,
    look: bool = False,
    uses_extra: Callable[[int], bool] = lambda rank: True,
) -> None:
    """A training step; ``look`` evaluates wherever there is a pause."""

    def pause() -> None:
        if look:
            t.evaluate()

    pause()
    for part in range(num_parts):
        sync = not no_sync or part == num_parts - 1
        t.backward(step, part, num_parts, sync=sync, uses_extra=uses_extra)
        pause()
    if max_norm is not None:
        t.clip(max_norm)
        pause()
    t.step()
    pause()
    t.optimizer.zero_grad(set_to_none=set_to_none)
    pause()


def accumulate_clip_and_look(t: Trainee) -> None:
    """Every two of: accumulation and its kind, clipping, kind of zero_grad, evaluation."""
    one_step(t, 0, num_parts=2, no_sync=True, max_norm=0.1)
    one_step(t, 1, num_parts=3, set_to_none=False, look=True)
    one_step(t, 2, num_parts=2, no_sync=True, set_to_none=False, look=True)
    one_step(t, 3, max_norm=0.1)
    one_step(t, 4, num_parts=3, max_norm=1.0)
    one_step(t, 5, max_norm=math.inf, set_to_none=False)


def look_before_clipping(t: Trainee) -> None:
    one_step(t, 0, max_norm=0.1, look=True)
    one_step(t, 1, num_parts=2, no_sync=True, max_norm=0.1, look=True)


def leave_out_and_freeze(t: Trainee) -> None:
    """Matrices without a gradient on one rank, on all, frozen from the start, thawed, frozen."""
    one_step(t, 0, max_norm=0.1, uses_extra=lambda rank: rank == 0)
    one_step(t, 1, num_parts=2, no_sync=True, uses_extra=lambda rank: False, look=True)
    t.freeze(FROZEN[:2], is_frozen=False)
    one_step(t, 2, num_parts=2, max_norm=0.1, uses_extra=lambda rank: rank != 0)
    t.freeze(["layers.0.v_proj.weight", "layers.1.extra_proj.weight"])
    one_step(t, 3, num_parts=2, no_sync=True, max_norm=1.0)


def clip_between_backwards(t: Trainee) -> None:
    """A clip holds for what was there; what comes after is added in full, then clipped again."""
    for step in range(2):
        t.clip(1.0)  # nothing yet
        t.backward(step, 0, 2)
        t.clip(math.inf)
        t.clip(0.2)
        t.clip(math.inf)
        t.backward(step, 1, 2)
        t.clip(math.inf)
        t.clip(0.3)
        t.step()
        t.step()  # gradients stay until zero_grad
        t.optimizer.zero_grad()


def save_and_go_back(t: Trainee) -> None:
    """Right after an evaluation; before the first step; again in the middle of accumulation."""
    t.evaluate()
    fresh = t.save()
    one_step(t, 0, look=True)
    saved = t.save()
    one_step(t, 1, max_norm=0.1)
    t.evaluate()
    t.load(fresh)
    t.evaluate()
    one_step(t, 2)
    t.evaluate()
    t.load(saved)
    one_step(t, 3, look=True)
    t.backward(4, 0, 2)
    t.evaluate()
    t.save()
    t.backward(4, 1, 2)
    t.step()
    t.optimizer.zero_grad()


def follow_schedules(t: Trainee) -> None:
    """Of torch, each for two steps, over groups with rates and decay of their own."""
    optimizer = t.optimizer
    factors = [lambda n, f=f: f**n for f in (0.9, 0.5, 0.7, 0.8, 0.6)]
    peaks = [0.03, 2e-3, 0.02, 0.02, 1e-3]
    kinds: list[Callable[[], Any]] = [
        lambda: lr_scheduler.LambdaLR(optimizer, factors),
        lambda: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
        lambda: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.LinearLR(optimizer, 0.5, total_iters=1),
                lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
            ],
            milestones=[1],
        ),
        lambda: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2),
        lambda: lr_scheduler.OneCycleLR(optimizer, peaks, total_steps=6),
    ]
    for index, make in enumerate(kinds):
        schedule = make()
        for step in range(2 * index, 2 * index + 2):
            one_step(t, step, max_norm=1.0 if step % 2 else None)
            schedule.step(*[1.0] if index == 1 else [])


PROGRAMS: dict[str, tuple[Program, dict[str, Any]]] = {
    "accumulate": (accumulate_clip_and_look, {"groups": SMOOTH}),
    "look and clip": (look_before_clipping, {}),
    "leave out": (leave_out_and_freeze, {"frozen": FROZEN}),
    "clip": (clip_between_backwards, {"groups": GROUPS}),
    "save": (save_and_go_back, {"groups": GROUPS, "frozen": FROZEN[1:]}),
    "schedules": (follow_schedules, {"groups": GROUPS}),
}


def expect_same(ours: OnRanks, alone: Alone) -> None:
    expected = torch.stack([value.float() for value in alone.log])
    torch.testing.assert_close(ours.global_log(), expected, rtol=1e-5, atol=1e-9)
    state = dmuon.get_model_state_dict(ours.model)
    assert_follows(state, alone.model.state_dict(), alone.start)


def meshes(world_size: int) -> list[tuple[int, ...]]:
    return [(2,), (2, 1)] if world_size == 2 else [(2, 2)]


@pytest.mark.parametrize("world_size", [2, 4], ids=["2 and 2x1", "2x2"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_on_ranks_equals_the_same_alone(name: str, world_size: int) -> None:
    program, options = PROGRAMS[name]
    alone = Alone(world_size, **options)
    program(alone)

    ways: list[tuple[tuple[int, ...], bool, Packing]]
    ways = [(shape, reshard, "owner") for shape in meshes(world_size) for reshard in (True, False)]

    def body(rank: int) -> None:
        for shape, reshard, packing in [*ways, (meshes(world_size)[0], True, "block")]:
            ours = OnRanks(make_mesh(*shape), reshard, packing=packing, **options)
            program(ours)
            expect_same(ours, alone)

    run_ranks(world_size, body)


def interleave(a: Trainee, b: Trainee) -> None:
    """Two models in one process, each in the middle of the other's step."""
    for step in range(3):
        a.backward(step, 0, 2, sync=False)
        b.backward(step + 7)
        a.evaluate()
        a.backward(step, 1, 2)
        b.clip(0.1)
        a.step()
        b.evaluate()
        b.step()
        a.clip(1.0)
        b.optimizer.zero_grad()
        a.optimizer.zero_grad()


@pytest.mark.parametrize("world_size", [2, 4], ids=["2 and 2x1", "2x2"])
def test_two_models_in_one_process(world_size: int) -> None:
    first, second = Alone(world_size), Alone(world_size, groups=GROUPS, seed=3)
    interleave(first, second)

    def body(rank: int) -> None:
        for shape in meshes(world_size):
            mesh = make_mesh(*shape)
            ours = OnRanks(mesh, reshard=True), OnRanks(mesh, False, groups=GROUPS, seed=3)
            interleave(*ours)
            expect_same(ours[0], first)
            expect_same(ours[1], second)

    run_ranks(world_size, body)


@pytest.mark.parametrize("no_sync", [False, True], ids=["", "no_sync"])
@pytest.mark.parametrize("world_size", [2, 4], ids=["2 and 2x1", "2x2"])
def test_bfloat16_compute_equals_one_process_computing_in_bfloat16(
    world_size: int, no_sync: bool
) -> None:
    """Step by step from equal weights: else a last bit rounds a weight the other way, and wide."""

    def body(rank: int) -> None:
        for shape, reshard in itertools.product(meshes(world_size), (True, False)):
            alone = Alone(world_size, compute=torch.bfloat16)
            ours = OnRanks(make_mesh(*shape), reshard, policy=BFLOAT16)
            for step in range(3):
                alone.start = dmuon.get_model_state_dict(ours.model)
                alone.model.load_state_dict(alone.start)
                for t in (ours, alone):
                    one_step(t, step, num_parts=2, no_sync=no_sync, max_norm=0.5 if step else None)
                expect_same(ours, alone)

    run_ranks(world_size, body)


SOME = ("layers.0.extra_proj.weight", "layers.1.v_proj.weight", "norm.bias")


@pytest.mark.parametrize(
    "shape",
    [(1,), (2,), (3,), (4,), (1, 2), (2, 1), (2, 2), (4, 1)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_norms_and_clipping_equal_one_process(shape: tuple[int, ...]) -> None:
    """With gradients that are frozen, missing, and not contiguous; infinity only measures."""

    def measure(t: Trainee) -> None:
        t.backward(0, 0, 2, uses_extra=lambda rank: False)
        lay_out_by_columns(t.model)
        for max_norm in (math.inf, 0.2, math.inf, 10.0):
            t.clip(max_norm)
        t.step()

    alone = Alone(math.prod(shape), frozen=SOME, groups=SMOOTH)
    measure(alone)
    assert any(not p.grad.is_contiguous() for p in alone.model.parameters() if p.grad is not None)

    def body(rank: int) -> None:
        ours = OnRanks(make_mesh(*shape), reshard=True, frozen=SOME, groups=SMOOTH)
        measure(ours)
        expect_same(ours, alone)

    run_ranks(math.prod(shape), body)


def lay_out_by_columns(model: torch.nn.Module) -> None:
    """Make the gradients of matrices that are at hand transposed views."""
    for param in model.parameters():
        grad = param.grad
        if grad is None or grad.ndim != 2:
            continue
        if isinstance(grad, DTensor):
            local = grad.to_local().T.contiguous().T
            param.grad = DTensor.from_local(
                local,
                grad.device_mesh,
                grad.placements,
                run_check=False,
                shape=grad.shape,
                stride=grad.stride(),
            )
        else:
            param.grad = grad.T.contiguous().T


def test_measuring_a_norm_changes_nothing() -> None:
    def body(rank: int) -> None:
        def run(measures: bool) -> list[Any]:
            ours = OnRanks(make_mesh(2, 1), reshard=True)
            for step in range(2):
                ours.backward(step)
                if measures:
                    ours.clip(math.inf)
                ours.step()
                ours.optimizer.zero_grad()
            return list(ours.save())

        assert_identical(run(True), run(False))

    run_ranks(2, body)
