"""Publishing to replicas: really asynchronous, never seen half done, equal on all of them.

To make a publish late on purpose, one rank begins its ``step()`` only when another has finished its
own and waits for what the late one owns. That is told by events, so these tests find out the same
on any machine however busy it is.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.synchronize import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from exact import assert_follows, assert_identical
from narrow import inputs, narrow_loss, prepare_narrow
from ranks_runner import run_ranks
from tiny import FormulaMuon, build, loss_of, tokens
from torch import nn
from torch.distributed.tensor import DTensor
from wrapped import backward, make_mesh, prepare

import dmuon
from dmuon.parcel import Parcel

PATIENCE_S = 20.0
ROWS = tokens(77)[:, :-1]  # of no training step
POLAR_EXPRESS = list(dmuon.POLAR_EXPRESS_COEFFICIENTS[:5])
GRIDS = pytest.mark.parametrize("shape", [(2, 1), (2, 2)], ids=["2x1", "2x2"])


class Watched:
    """A work under way; says so when somebody waits for it."""

    def __init__(self, work: dist.Work, is_awaited: Event) -> None:
        self._work, self._is_awaited = work, is_awaited

    def wait(self, *args: Any) -> bool:
        self._is_awaited.set()
        return self._work.wait(*args)

    def is_completed(self) -> bool:
        return self._work.is_completed()


@contextmanager
def watching_publishes(is_awaited: Event) -> Iterator[None]:
    """Within, whoever waits for a broadcast that was begun within sets ``is_awaited``."""
    broadcast = dist.broadcast

    def watched(*args: Any, **options: Any) -> Watched:
        return Watched(broadcast(*args, **options), is_awaited)

    dist.broadcast = watched
    try:
        yield
    finally:
        dist.broadcast = broadcast


class LateOwner:
    """Rank 0, whose step begins when its peer, the same column's next replica, lets it.

    The peer finishes its own step first; then it lets the owner begin by waiting for what its
    step has begun to receive, or by ``release``. Gradients must have been settled before.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._num_columns = shape[1]
        self.may_begin = mp.get_context("fork").Event()

    @property
    def is_me(self) -> bool:
        return dist.get_rank() == 0

    @property
    def is_my_peer(self) -> bool:
        return dist.get_rank() == self._num_columns

    def step(self, optimizer: dmuon.Muon) -> None:
        if self.is_me:
            assert self.may_begin.wait(PATIENCE_S), "nobody waits for the owner"
        with watching_publishes(self.may_begin) if self.is_my_peer else nullcontext():
            optimizer.step()

    def release(self) -> None:
        if self.is_my_peer:
            self.may_begin.set()


def evaluate(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(ROWS)


def prepare_gradients(shape: tuple[int, ...], reshard: bool = True) -> tuple[nn.Module, dmuon.Muon]:
    """A model and optimizer after one backward, with all gradients on their owners."""
    model = prepare(make_mesh(*shape), reshard)
    optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
    backward(model, 0)
    dmuon.clip_grad_norm_(model, math.inf)
    return model, optimizer


@GRIDS
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_an_evaluation_after_step_waits_for_a_late_owner(
    shape: tuple[int, ...], reshard: bool
) -> None:
    late = LateOwner(shape)

    def body(rank: int) -> None:
        model, optimizer = prepare_gradients(shape, reshard)
        before = evaluate(model)
        late.step(optimizer)
        at_once = evaluate(model)
        late.release()  # had nobody waited, the evaluation is over and was stale
        dmuon.wait_all_replicate_broadcasts(model)
        dist.barrier()
        assert (at_once - before).abs().max() > 1e-3
        assert torch.equal(at_once, evaluate(model))

    run_ranks(math.prod(shape), body)


def test_it_is_the_drain_that_makes_an_evaluation_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without it: what the other replica computes with is stale."""
    late = LateOwner((2, 1))
    drain = Parcel.drain

    def body(rank: int) -> None:
        model, optimizer = prepare_gradients((2, 1))
        if late.is_my_peer:
            monkeypatch.setattr(Parcel, "drain", lambda parcel: None)
        late.step(optimizer)
        at_once = evaluate(model)
        late.release()
        monkeypatch.setattr(Parcel, "drain", drain)
        dmuon.wait_all_replicate_broadcasts(model)
        dist.barrier()
        assert torch.equal(at_once, evaluate(model)) == late.is_me

    run_ranks(2, body)


@GRIDS
@pytest.mark.parametrize("replicate_async", [True, False], ids=["async", "sync"])
def test_step_waits_for_other_owners_only_when_told_to(
    shape: tuple[int, ...], replicate_async: bool
) -> None:
    """A step of another replica is over before the owner begins its own, or it is not."""
    late = LateOwner(shape)
    is_over = mp.get_context("fork").Event()

    def body(rank: int) -> None:
        _, optimizer = prepare_gradients(shape)
        optimizer.replicate_async = replicate_async
        if late.is_me:
            assert late.may_begin.wait(PATIENCE_S)
            assert is_over.is_set() == replicate_async
        late.step(optimizer)
        if late.is_my_peer:
            is_over.set()
        late.release()

    run_ranks(math.prod(shape), body)


def test_waiting_by_hand_brings_the_weights_of_a_late_owner() -> None:
    late = LateOwner((2, 1))

    def body(rank: int) -> None:
        model, optimizer = prepare_gradients((2, 1))
        params = dmuon.get_dedicated_params(model)
        before = {name: param.detach().clone() for name, param in params.items()}
        late.step(optimizer)
        if late.is_my_peer:
            assert not late.may_begin.is_set()
            stale = {name for name in params if torch.equal(before[name], params[name])}
            assert stale == set(dmuon.get_owned_params(model, 0))
        dmuon.wait_all_replicate_broadcasts(model)
        late.release()
        assert not any(torch.equal(before[name], params[name]) for name in params)
        assert_replicas_identical(model)

    run_ranks(2, body)


def read_model(model: nn.Module, optimizer: dmuon.Muon) -> Any:
    return dmuon.get_model_state_dict(model)


def read_optimizer(model: nn.Module, optimizer: dmuon.Muon) -> Any:
    return dmuon.get_optimizer_state_dict(model, optimizer)


@GRIDS
@pytest.mark.parametrize("read", [read_model, read_optimizer])
def test_a_state_dict_taken_after_step_waits_for_a_late_owner(
    shape: tuple[int, ...], read: Callable[[nn.Module, dmuon.Muon], Any]
) -> None:
    late = LateOwner(shape)

    def body(rank: int) -> None:
        model, optimizer = prepare_gradients(shape)
        late.step(optimizer)
        late.release()  # the dict itself needs every rank, so the owner may begin now
        at_once = read(model, optimizer)
        dmuon.wait_all_replicate_broadcasts(model)
        dist.barrier()
        assert_identical(at_once, read(model, optimizer))
        assert_same_everywhere(at_once)
        if read is read_model:
            start = build().state_dict()
            assert not any(torch.equal(start[n], v) for n, v in at_once.items() if "proj.w" in n)
        else:
            assert at_once["dedicated"].keys() == dmuon.get_dedicated_params(model).keys()
        assert_replicas_identical(model)

    run_ranks(math.prod(shape), body)


@GRIDS
def test_a_second_step_after_a_late_one_uses_the_same_gradients_again(
    shape: tuple[int, ...],
) -> None:
    late = LateOwner(shape)
    alone = build().double()
    formula = FormulaMuon(alone, coefficients=POLAR_EXPRESS, dtype=torch.float64)
    loss_of(alone, tokens(0)).backward()
    grads = [(param, param.grad) for param in alone.parameters()]
    for _ in range(2):
        for param, grad in grads:
            param.grad = grad
        formula.step()
    answer, start = alone.state_dict(), build().state_dict()

    def body(rank: int) -> None:
        model, optimizer = prepare_gradients(shape)
        late.step(optimizer)
        optimizer.step()
        late.release()
        assert_follows(dmuon.get_model_state_dict(model), answer, start)
        assert_replicas_identical(model)

    run_ranks(math.prod(shape), body)


@GRIDS
def test_a_model_loaded_after_step_stays_when_an_owner_publishes_late(
    shape: tuple[int, ...],
) -> None:
    late = LateOwner(shape)

    def body(rank: int) -> None:
        model, optimizer = prepare_gradients(shape)
        late.step(optimizer)
        late.release()  # loading needs every rank, so the owner may begin now
        loaded = dict(build(seed=5).state_dict())
        dmuon.set_model_state_dict(model, loaded)
        at_once = weights_in_use(model)
        assert_identical(at_once, {name: loaded[name] for name in at_once})
        assert_replicas_identical(model)
        assert_identical(dmuon.get_model_state_dict(model), loaded)

    run_ranks(math.prod(shape), body)


@GRIDS
def test_an_optimizer_loaded_after_step_leaves_the_weights_of_a_late_owner(
    shape: tuple[int, ...],
) -> None:
    late = LateOwner(shape)

    def body(rank: int) -> None:
        model, optimizer = prepare_gradients(shape)
        moments = dmuon.get_optimizer_state_dict(model, optimizer)
        before = weights_in_use(model)
        late.step(optimizer)
        late.release()
        dmuon.set_optimizer_state_dict(model, optimizer, moments)
        at_once = weights_in_use(model)
        assert not any(torch.equal(before[name], at_once[name]) for name in before)
        assert_replicas_identical(model)
        state = dmuon.get_model_state_dict(model)
        assert_identical(at_once, {name: state[name] for name in at_once})
        assert_identical(dmuon.get_optimizer_state_dict(model, optimizer), moments)

    run_ranks(math.prod(shape), body)


# Replicas, bit by bit ---------------------------------------------------------------------


def weights_in_use(model: nn.Module, x: torch.Tensor = ROWS) -> dict[str, torch.Tensor]:
    """Each dedicated matrix as a forward of this rank finds it."""
    used: dict[str, torch.Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda module, args: used.update({name: module.weight.detach().clone()})

    hooks = [
        module.register_forward_pre_hook(note(f"{name}.weight"))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "proj" in name
    ]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return {name: used[name] for name in dmuon.get_dedicated_params(model)}


def bits(value: torch.Tensor) -> torch.Tensor:
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.detach().contiguous().view(torch.int32)  # so that NaN equals NaN


def assert_same_over(tensors: dict[str, torch.Tensor], group: Any) -> None:
    for name, value in tensors.items():
        mine = bits(value)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, mine, group=group)
        assert all(torch.equal(mine, each) for each in gathered), name


def assert_same_everywhere(state: Any) -> None:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, state)
    for each in gathered:
        assert_identical(state, each)


def assert_replicas_identical(model: nn.Module, x: torch.Tensor = ROWS) -> None:
    """What replicas keep at rest, over the replicate axis, and compute with, over all ranks."""
    symmetric = next(p for p in model.parameters() if isinstance(p, DTensor))
    dmuon.wait_all_replicate_broadcasts(model)
    at_rest = dict(model.named_parameters())
    assert_same_over(at_rest, symmetric.device_mesh.get_group("replicate"))
    used = weights_in_use(model, x)
    assert all(torch.isfinite(value).all() for value in used.values())
    assert_same_over(used, dist.group.WORLD)


@contextmanager
def churned_memory(generator: torch.Generator) -> Iterator[None]:
    """Take and free blocks of NaN of many sizes, so that reading what was freed shows."""
    sizes = torch.randint(1, 30_000, (12,), generator=generator).tolist()
    blocks = [torch.full((size,), math.nan) for size in sizes]
    del blocks[::2]
    yield
    del blocks


def note_weights(model: nn.Module) -> list[int]:
    """A sum of the bits of each dedicated matrix whenever a forward of this rank uses it."""
    sums: list[int] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "proj" in name:
            module.register_forward_pre_hook(
                lambda module, args: sums.append(int(bits(module.weight).sum(dtype=torch.int64)))
            )
    return sums


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (4, 1)], ids=["2x1", "2x2", "4x1"])
def test_replicas_use_and_keep_the_same_bits_for_50_steps(shape: tuple[int, ...]) -> None:
    def body(rank: int) -> None:
        model = prepare_narrow(make_mesh(*shape))
        optimizer = dmuon.Muon(model, lr=0.01, ns_steps=1)
        sums = note_weights(model)
        generator = torch.Generator().manual_seed(rank)
        for step in range(50):
            with churned_memory(generator):
                loss = narrow_loss(model, inputs(4 * step + rank))
                loss.backward()
                assert math.isfinite(loss)
            with churned_memory(generator):
                optimizer.step()
            optimizer.zero_grad()
        assert len(sums) == 50 * len(dmuon.get_dedicated_params(model))
        assert len(set(sums)) >= 195
        assert_same_everywhere(sums)
        assert_replicas_identical(model, inputs(0))

    run_ranks(math.prod(shape), body)
