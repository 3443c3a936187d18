"""Odd models and odd orders of calls, against one process: the answers must be the same."""

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from ranks_runner import run_ranks
from tiny import FormulaMuon, build, is_proj, loss_of, share, tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from wrapped import backward, make_mesh, prepare, train, wrap

import dmuon


def expect_equal(state: dict[str, torch.Tensor], alone: nn.Module) -> None:
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=2e-5, msg=name)


def formula_for(alone: nn.Module) -> FormulaMuon:
    return FormulaMuon(alone, coefficients=list(dmuon.POLAR_EXPRESS_COEFFICIENTS[:5]))


@dataclass
class Output:
    """A class that torch's pytree does not know, so hooks have to look inside."""

    hidden: torch.Tensor


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(6, 6, bias=False)
        self.out_proj = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(self.out_proj(torch.relu(self.in_proj(x))))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).hidden
        return x


def layers_and_inputs(world_size: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Layers(), torch.randn(world_size, 4, 6)


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def test_outputs_hidden_in_a_dataclass() -> None:
    def body(rank: int) -> None:
        model, x = layers_and_inputs(2)
        alone = copy.deepcopy(model)
        dmuon.dedicate_params(model, make_mesh(2), predicate=is_proj)
        optimizer, formula = dmuon.Muon(model), formula_for(alone)
        for _ in range(2):
            mean_square(model, x[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
            mean_square(alone, x).backward()
            formula.step()
        expect_equal(dmuon.get_model_state_dict(model), alone)

    run_ranks(2, body)


def test_a_grid_given_apart_whose_ranks_do_not_ascend_row_by_row() -> None:
    def body(rank: int) -> None:
        model, x = layers_and_inputs(4)
        alone = copy.deepcopy(model)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
        dmuon.dedicate_params(model, mesh["shard"], is_proj, replicate_mesh=mesh["replicate"])
        optimizer, formula = dmuon.Muon(model), formula_for(alone)
        for _ in range(2):
            mean_square(model, x[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
            mean_square(alone, x).backward()
            formula.step()
        expect_equal(dmuon.get_model_state_dict(model), alone)

    run_ranks(4, body)


def _freeze(model: nn.Module, is_frozen: bool) -> None:
    for name, param in model.named_parameters():
        if name in ("layers.1.q_proj.weight", "layers.1.down_proj.weight"):
            param.requires_grad_(not is_frozen)


@pytest.mark.parametrize(
    "is_frozen", [lambda step: step % 2 == 1, lambda step: step == 0], ids=["toggled", "thawed"]
)
def test_matrices_frozen_and_thawed_between_steps(is_frozen: Callable[[int], bool]) -> None:
    def body(rank: int) -> None:
        alone, model = build(), build()
        _freeze(model, is_frozen(0))
        wrap(model, make_mesh(2))
        optimizer, formula = dmuon.Muon(model), formula_for(alone)
        for step in range(3):
            _freeze(model, is_frozen(step))
            _freeze(alone, is_frozen(step))
            train(model, optimizer, range(step, step + 1))
            loss_of(alone, tokens(step)).backward()
            formula.step()
        expect_equal(dmuon.get_model_state_dict(model), alone)

    run_ranks(2, body)


class Fragile(torch.autograd.Function):
    """The identity, whose backward fails while ``is_broken``."""

    is_broken = False

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        if Fragile.is_broken:
            raise ValueError("broken on purpose")
        return grad


def _fail(loss: torch.Tensor) -> None:
    Fragile.is_broken = True
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward()
    Fragile.is_broken = False


@pytest.mark.parametrize("ran_ahead", [True, False], ids=["forward before", "forward after"])
def test_training_goes_on_after_a_backward_that_failed_on_all_ranks(ran_ahead: bool) -> None:
    def body(rank: int) -> None:
        model, x = layers_and_inputs(2)
        alone = copy.deepcopy(model)
        dmuon.dedicate_params(model, make_mesh(2), predicate=is_proj)
        optimizer, formula = dmuon.Muon(model), formula_for(alone)
        model.layers[1].register_forward_hook(lambda m, a, out: Output(Fragile.apply(out.hidden)))
        first = mean_square(model, x[rank])
        second = mean_square(model, x[rank]) if ran_ahead else None
        _fail(first)
        optimizer.zero_grad()
        (mean_square(model, x[rank]) if second is None else second).backward()
        optimizer.step()
        mean_square(alone, x).backward()
        formula.step()
        expect_equal(dmuon.get_model_state_dict(model), alone)

    run_ranks(2, body)


def test_beside_fully_shard_a_failed_backward_is_final() -> None:
    """fully_shard keeps a flag from it and adds the next gradients up wrongly, in silence."""

    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        dmuon.Muon(model)
        model.layers[0].register_forward_hook(lambda m, a, out: Fragile.apply(out))
        _fail(loss_of(model, tokens(0)))
        with pytest.raises(dmuon.OwnershipError, match="ended with an exception"):
            loss_of(model, tokens(0))

    run_ranks(2, body)


def test_an_exception_in_forward_leaves_nothing_behind() -> None:
    def body(rank: int) -> None:
        def fail(*_: object) -> None:
            raise ValueError("broken on purpose")

        model, fresh = prepare(make_mesh(2)), prepare(make_mesh(2))
        optimizer = dmuon.Muon(model)
        hook = model.layers[1].q_proj.register_forward_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            backward(model, 0)
        hook.remove()
        assert train(model, optimizer, range(2)) == train(fresh, dmuon.Muon(fresh), range(2))

    run_ranks(2, body)


def test_inference_mode_first_and_between() -> None:
    def body(rank: int) -> None:
        model, x = layers_and_inputs(2)
        alone = copy.deepcopy(model)
        dmuon.dedicate_params(model, make_mesh(2), predicate=is_proj)
        with torch.inference_mode():
            mean_square(model, x[rank])
        optimizer, formula = dmuon.Muon(model), formula_for(alone)
        for _ in range(2):
            mean_square(model, x[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
            mean_square(alone, x).backward()
            formula.step()
            with torch.inference_mode():
                torch.testing.assert_close(model(x[rank]), alone(x[rank]), rtol=0, atol=2e-5)
        expect_equal(dmuon.get_model_state_dict(model), alone)

    run_ranks(2, body)


class Checkpointed(nn.Module):
    """Two blocks in one checkpoint and one that ends in something else, or all reentrant."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        inner = self.inner
        first, second, third = inner.layers
        x = inner.embed(tokens_BT)
        x = checkpoint(lambda y: second(first(y)) * 1.0, x, use_reentrant=self.reentrant)
        x = checkpoint(lambda y: inner.norm(third(y)), x, use_reentrant=self.reentrant)
        return inner.head(x)


def _shard_inner(model: nn.Module, mesh: DeviceMesh) -> None:
    dmuon.dedicate_params(model, mesh, predicate=is_proj)
    for layer in model.inner.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def test_two_blocks_in_one_checkpoint() -> None:
    def body(rank: int) -> None:
        model, alone = Checkpointed(build(), False), Checkpointed(build(), False)
        _shard_inner(model, make_mesh(2))
        optimizer, formula = dmuon.Muon(model), formula_for(alone)
        train(model, optimizer, range(2))
        for step in range(2):
            loss_of(alone, tokens(step)).backward()
            formula.step()
        expect_equal(dmuon.get_model_state_dict(model), alone)

    run_ranks(2, body)


def test_several_backwards_of_one_graph_and_of_two() -> None:
    def body(rank: int) -> None:
        model, alone = prepare(make_mesh(2)), build()
        optimizer, formula = dmuon.Muon(model), formula_for(alone)
        rows = share(tokens(0), rank, 2)
        first, second = loss_of(model, rows), loss_of(model, share(tokens(1), rank, 2))
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        optimizer.step()
        (2 * loss_of(alone, tokens(0)) + loss_of(alone, tokens(1))).backward()
        formula.step()
        expect_equal(dmuon.get_model_state_dict(model), alone)

    run_ranks(2, body)


def test_a_leaf_that_a_block_returns_keeps_no_hooks() -> None:
    class Giver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.gain = nn.Linear(6, 6, bias=False), nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.proj(x), self.gain

    def body(rank: int) -> None:
        model = Giver()
        dmuon.dedicate_params(model, make_mesh(1), predicate=is_proj)
        dmuon.Muon(model)
        for _ in range(3):
            model(torch.ones(2, 6))[0].sum().backward()
        assert not model.gain._backward_hooks

    run_ranks(1, body)


def test_a_dropped_model_is_freed_and_steps_leak_nothing() -> None:
    def body(rank: int) -> None:
        model, x = layers_and_inputs(2)
        dmuon.dedicate_params(model, make_mesh(2), predicate=is_proj)
        optimizer = dmuon.Muon(model)

        def count(model: nn.Module, optimizer: dmuon.Muon, steps: int) -> int:
            for _ in range(steps):
                mean_square(model, x[rank]).backward()
                dmuon.clip_grad_norm_(optimizer, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            gc.collect()
            return len(gc.get_objects())

        assert count(model, optimizer, 3) >= count(model, optimizer, 12)
        watched = [weakref.ref(model), weakref.ref(model.layers[0].in_proj.weight)]
        del model, optimizer
        gc.collect()
        assert [each() for each in watched] == [None, None]

    run_ranks(2, body)


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_schedulers_that_cycle_momentum(name: str) -> None:
    settings = {
        "OneCycleLR": {"max_lr": [0.02, 1e-3], "total_steps": 20},
        "CyclicLR": {"base_lr": 1e-4, "max_lr": 0.02},
    }

    def body(rank: int) -> None:
        model = prepare(make_mesh(1))
        optimizer = dmuon.Muon(model)
        schedule = getattr(torch.optim.lr_scheduler, name)(optimizer, **settings[name])
        seen = set()
        for step in range(3):
            train(model, optimizer, range(step, step + 1))
            schedule.step()
            seen.add(optimizer.param_groups[0]["momentum"])
        assert len(seen) == 3

    run_ranks(1, body)


def test_extra_state_of_a_module_is_restored() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.calls = nn.Linear(4, 4), {"n": 5}

        def get_extra_state(self) -> dict[str, int]:
            return self.calls

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.calls = state

    def body(rank: int) -> None:
        model = Counting()
        dmuon.dedicate_params(model, make_mesh(2), predicate=is_proj)
        fully_shard(model, mesh=make_mesh(2))
        state = dmuon.get_model_state_dict(model, rank0_only=True)
        model.calls["n"] = 7
        dmuon.set_model_state_dict(model, state)
        assert model.calls == {"n": 5}

    run_ranks(2, body)
