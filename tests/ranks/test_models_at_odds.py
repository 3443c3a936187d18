"""Models built apart, changed too late, or keeping secrets from their blocks."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks_runner import run_ranks
from tiny import FormulaMuon, build, is_proj, loss_of, share, tokens
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from wrapped import backward, make_mesh, prepare, train, wrap

import dmuon


def expect_equal(state: dict[str, torch.Tensor], alone: nn.Module, atol: float = 2e-5) -> None:
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=atol, msg=name)


def formula_for(alone: nn.Module) -> FormulaMuon:
    return FormulaMuon(alone, coefficients=list(dmuon.POLAR_EXPRESS_COEFFICIENTS[:5]))


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)], ids=str)
def test_replicas_built_with_different_seeds_start_as_the_first(shape: tuple[int, ...]) -> None:
    def body(rank: int) -> None:
        row = rank // shape[1]
        model = prepare(make_mesh(*shape), seed=row)
        optimizer = dmuon.Muon(model)
        alone = build(seed=0)
        assert all(
            torch.equal(value, alone.state_dict()[name])
            for name, value in dmuon.get_model_state_dict(model).items()
        )
        formula = formula_for(alone)
        train(model, optimizer, range(2))
        for step in range(2):
            loss_of(alone, tokens(step)).backward()
            formula.step()
        expect_equal(dmuon.get_model_state_dict(model), alone)
        for name, param in model.named_parameters():  # each replica's own copy, not the first's
            if name not in dmuon.get_dedicated_params(model):
                copies = [torch.empty_like(param.to_local()) for _ in range(shape[0])]
                dist.all_gather(copies, param.to_local(), group=param.device_mesh.get_group(0))
                assert all(torch.equal(each, copies[0]) for each in copies), name

    run_ranks(shape[0] * shape[1], body)


class Looped(nn.Module):
    """The tiny model with checkpointed blocks, one of which runs twice."""

    def __init__(self, inner: nn.Module, is_reentrant: bool | None) -> None:
        super().__init__()
        self.inner, self.is_reentrant = inner, is_reentrant

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x = self.inner.embed(tokens_BT)
        for layer in [*self.inner.layers, self.inner.layers[1]]:
            if self.is_reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.is_reentrant)
        return self.inner.head(self.inner.norm(x))


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=str)
@pytest.mark.parametrize("is_reentrant", [True, False], ids=["reentrant", "saved tensors"])
def test_both_kinds_of_checkpointing_equal_one_process_and_send_gradients_once(
    is_reentrant: bool, shape: tuple[int, ...], reshard: bool
) -> None:
    def body(rank: int) -> None:
        mesh = make_mesh(*shape)
        model = Looped(build(), is_reentrant)
        dmuon.dedicate_params(model, mesh, is_proj, reshard_after_forward=reshard)
        for layer in model.inner.layers:
            if not is_reentrant:  # refused: see the next test
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        counters = dmuon.get_counters(model)
        alone = Looped(build(), None)
        formula = formula_for(alone)
        for step in range(2):
            backward(model, step)
            assert counters.reductions == (step + 1) * 3
            optimizer.step()
            optimizer.zero_grad()
            loss_of(alone, tokens(step)).backward()
            formula.step()
        expect_equal(dmuon.get_model_state_dict(model), alone)

    run_ranks(2, body)


def test_a_sharded_block_that_runs_twice_under_reentrant_checkpoints_is_refused_by_name() -> None:
    """fully_shard alone would lose gradients of its norms and biases there, in silence."""

    def body(rank: int) -> None:
        mesh = make_mesh(2)
        model = Looped(build(), is_reentrant=True)
        dmuon.dedicate_params(model, mesh, is_proj)
        for layer in model.inner.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with pytest.raises(dmuon.OwnershipError, match=r"inner\.layers\.1 runs twice"):
            backward(model, 0)

    run_ranks(2, body)


def test_a_matrix_inside_and_outside_of_a_reentrant_checkpoint_is_refused_by_name() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(self.layers[1], self.layers[0](x), use_reentrant=True)
            return self.layers[1](y)

    def body(rank: int) -> None:
        torch.manual_seed(0)
        model = Half()
        inputs = torch.randn(2, 4, 6)
        dmuon.dedicate_params(
            model, make_mesh(2), lambda n, p: True, hook_boundary_predicate=lambda n, m: True
        )
        dmuon.Muon(model)
        with pytest.raises(dmuon.OwnershipError, match=r"layers\.1\.weight got a second gradient"):
            model(inputs[rank]).square().mean().backward()

    run_ranks(2, body)


class Routing(nn.Module):
    """Keeps the router's logits on itself, where no hook on its output sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3, bias=False)
        self.proj = nn.Linear(6, 6, bias=False)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.router(x)
        self.kept = logits.square().mean()
        return x + self.proj(x) * logits.softmax(-1).amax(-1, keepdim=True)


class WithAuxiliaryLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routing() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def aux_loss_first(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x).square().mean()
    return out + sum(layer.kept for layer in model.layers)


def aux_loss_alone(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model(x)
    return sum(layer.kept for layer in model.layers)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("loss", [aux_loss_first, aux_loss_alone])
def test_a_loss_that_leaves_a_block_beside_its_output(
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor], reshard: bool
) -> None:
    def body(rank: int) -> None:
        torch.manual_seed(0)
        alone = WithAuxiliaryLoss()
        model = copy.deepcopy(alone)
        mesh = make_mesh(2)
        dmuon.dedicate_params(model, mesh, reshard_after_forward=reshard)
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        formula = FormulaMuon(
            alone,
            is_muon=lambda n, p: True,
            coefficients=list(dmuon.POLAR_EXPRESS_COEFFICIENTS[:5]),
        )
        for _ in range(2):
            x = torch.randn(2, 4, 6)
            loss(model, x[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
            (sum(loss(alone, part) for part in x) / 2).backward()
            formula.step()
        expect_equal(dmuon.get_model_state_dict(model), alone)

    run_ranks(2, body)


Change = Callable[[nn.Module], object]


def replace_module(model: nn.Module) -> None:
    model.layers[1].q_proj = nn.Linear(24, 24, bias=False)


def replace_parameter(model: nn.Module) -> None:
    model.layers[1].q_proj.weight = nn.Parameter(torch.zeros(24, 24))


def remove(model: nn.Module) -> None:
    del model.layers[2]


@pytest.mark.parametrize(
    "change", [replace_module, remove, nn.Module.half, nn.Module.bfloat16, nn.Module.double]
)
def test_a_model_changed_between_dedication_and_optimizer(change: Change) -> None:
    def body(rank: int) -> None:
        model = wrap(build(), make_mesh(1)) if change is not remove else build()
        if change is remove:
            dmuon.dedicate_params(model, make_mesh(1), is_proj)
        change(model)
        with pytest.raises(dmuon.SetupError, match=r"after\s+dedicate_params"):
            dmuon.Muon(model)

    run_ranks(1, body)


@pytest.mark.parametrize("change", [replace_parameter, nn.Module.half, nn.Module.bfloat16])
def test_a_model_changed_after_the_optimizer_was_built(change: Change) -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(1))
        optimizer = dmuon.Muon(model)
        train(model, optimizer, range(1))
        change(model)
        with pytest.raises(dmuon.SetupError, match=r"layers\.\d.*after dedicate_params"):
            backward(model, 1)

    run_ranks(1, body)


def test_wrapping_after_the_optimizer_was_built() -> None:
    def body(rank: int) -> None:
        model = build()
        dmuon.dedicate_params(model, make_mesh(1), is_proj)
        dmuon.Muon(model)  # a world of one may do without fully_shard
        fully_shard(model, mesh=make_mesh(1))
        with pytest.raises(dmuon.SetupError, match="given to fully_shard after"):
            backward(model, 0)

    run_ranks(1, body)


def test_a_parameter_added_after_the_optimizer_was_built() -> None:
    def body(rank: int) -> None:
        model = build()
        dmuon.dedicate_params(model, make_mesh(1), is_proj)
        optimizer = dmuon.Muon(model)
        model.extra = nn.Linear(3, 3)
        backward(model, 0)
        with pytest.raises(dmuon.SetupError, match=r"extra\.weight is no parameter of this"):
            optimizer.step()

    run_ranks(1, body)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=str)
def test_gradients_that_are_not_finite_are_named_on_every_rank(
    shape: tuple[int, ...], bad: float
) -> None:
    spoilt = ["embed.weight", "layers.1.up_proj.weight"]

    def body(rank: int) -> None:
        model = prepare(make_mesh(*shape))
        optimizer = dmuon.Muon(model)
        backward(model, 0)
        assert dmuon.nonfinite_gradients(model) == []
        dmuon.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        optimizer.zero_grad()
        before = dmuon.get_model_state_dict(model)

        def spoil(grad: torch.Tensor) -> torch.Tensor:
            return torch.full_like(grad, bad) if rank == 1 else grad

        hooks = [p.register_hook(spoil) for n, p in model.named_parameters() if n == spoilt[1]]
        hooks.append(
            model.embed.register_forward_hook(lambda m, a, out: out.register_hook(spoil) and None)
        )
        backward(model, 1)
        with pytest.raises(dmuon.NonFiniteGradientError, match=r"embed\.weight") as caught:
            dmuon.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
        assert caught.value.names == spoilt == dmuon.nonfinite_gradients(optimizer)
        optimizer.zero_grad()
        for hook in hooks:
            hook.remove()
        after = dmuon.get_model_state_dict(model)
        assert all(torch.equal(after[name], before[name]) for name in before)
        backward(model, 2)
        assert dmuon.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True).isfinite()

    run_ranks(2, body)


def test_norm_is_measured_and_gradients_left_alone_with_an_infinite_limit() -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        dmuon.Muon(model)
        backward(model, 0)
        first = dmuon.clip_grad_norm_(model, float("inf"))
        assert torch.equal(first, dmuon.clip_grad_norm_(model, float("inf")))
        alone = build()
        loss_of(alone, tokens(0)).backward()
        expected = nn.utils.clip_grad_norm_(alone.parameters(), float("inf"))
        torch.testing.assert_close(first, expected)

    run_ranks(2, body)


class Sharing(nn.Module):
    """A block whose inner module may belong to another block too."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.proj, self.shared = nn.Linear(6, 6), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(torch.tanh(self.shared(x)))


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_a_module_that_two_blocks_share_is_whole_in_both(reshard: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        shared = nn.Linear(6, 6, bias=False)
        return nn.Sequential(Sharing(shared), nn.ReLU(), Sharing(shared), Sharing(shared))

    def body(rank: int) -> None:
        model, alone, mesh = make(), make(), make_mesh(2)
        is_matrix = lambda name, param: param.ndim == 2  # noqa: E731
        dmuon.dedicate_params(model, mesh, is_matrix, reshard_after_forward=reshard)
        for index in (0, 2, 3):
            fully_shard(model[index], mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        coefficients = list(dmuon.POLAR_EXPRESS_COEFFICIENTS[:5])
        formula = FormulaMuon(alone, is_muon=is_matrix, coefficients=coefficients)
        for _ in range(2):
            x = torch.randn(2, 4, 6)
            model(x[rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            alone(x).square().mean().backward()
            formula.step()
        expect_equal(dmuon.get_model_state_dict(model), alone)

    run_ranks(2, body)


def test_groups_of_a_second_model_are_those_of_the_first() -> None:
    def body(rank: int) -> None:
        world = dist.distributed_c10d._world
        mesh = make_mesh(2, 1)
        first = prepare(mesh)
        dmuon.Muon(first)
        count = len(world.pg_map)
        second = prepare(mesh)
        dmuon.Muon(second)
        assert len(world.pg_map) == count
        assert share(tokens(0), rank, 2).shape[0] == 6

    run_ranks(2, body)


def test_clipping_and_zero_grad_after_an_evaluation_see_the_gradients_of_all_parameters() -> None:
    """fully_shard shows whole parameters without gradients after a forward without backward."""

    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            loss_of(model, tokens(9))

    def body(rank: int) -> None:
        model, alone = prepare(make_mesh(2)), build()
        optimizer, formula = dmuon.Muon(model, ns_dtype=torch.float32), formula_for(alone)
        backward(model, 5)
        evaluate(model)
        model.zero_grad()
        backward(model, 0)
        evaluate(model)
        norm = dmuon.clip_grad_norm_(model, 0.1)
        optimizer.step()
        loss_of(alone, tokens(0)).backward()
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        formula.step()
        torch.testing.assert_close(norm, expected, rtol=1e-4, atol=1e-6)
        expect_equal(dmuon.get_model_state_dict(model), alone)

    run_ranks(2, body)


def test_gradient_sync_of_fully_shard_on_the_outermost_module_speaks_for_all() -> None:
    def body(rank: int) -> None:
        model, alone = prepare(make_mesh(2)), build()
        optimizer, formula = dmuon.Muon(model, ns_dtype=torch.float32), formula_for(alone)
        counters = dmuon.get_counters(model)
        model.set_requires_gradient_sync(False)
        backward(model, 0)
        assert counters.reductions == 0
        with pytest.raises(dmuon.OwnershipError, match="have not been sent"):
            optimizer.step()
        model.set_requires_gradient_sync(True)
        backward(model, 1)
        optimizer.step()
        (loss_of(alone, tokens(0)) + loss_of(alone, tokens(1))).backward()
        formula.step()
        expect_equal(dmuon.get_model_state_dict(model), alone)
        for refused in (
            lambda: model.layers[0].set_requires_gradient_sync(False),
            lambda: model.set_requires_gradient_sync(False, recurse=False),
        ):
            with pytest.raises(dmuon.OwnershipError, match=r"use dmuon\.no_sync"):
                refused()

    run_ranks(2, body)
