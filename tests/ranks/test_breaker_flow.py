"""Calls inside calls, tensors beside outputs, settings changed late: one process or an error."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from ranks_runner import run_ranks
from tiny import FormulaMuon, build, is_proj, loss_of, share, tokens
from torch import nn
from torch.distributed.fsdp import fully_shard
from wrapped import backward, make_mesh, wrap

import dmuon

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def formula_for(alone: nn.Module) -> FormulaMuon:
    return FormulaMuon(alone, coefficients=list(dmuon.POLAR_EXPRESS_COEFFICIENTS[:5]))


def expect_equal(model: nn.Module, alone: nn.Module) -> None:
    state = dmuon.get_model_state_dict(model)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=2e-5, msg=name)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(6, 6, bias=False)
        self.out_proj = nn.Linear(6, 6, bias=False)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_proj(torch.relu(self.in_proj(x)))


class CallsItself(Pair):
    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        return x + self.inner(self(x, depth - 1) if depth else x)


class AsksItself(Pair):
    """Its own answer without gradients is part of its input, as in self-distillation."""

    def forward(self, x: torch.Tensor, is_asked: bool = False) -> torch.Tensor:
        if not is_asked:
            with torch.no_grad():
                x = x + self(x, is_asked=True)
        return x + self.inner(x)


class Force(Pair):
    """Runs a backward in its forward, as models of energies and forces do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            (force,) = torch.autograd.grad(torch.tanh(self.in_proj(x)).square().sum(), x)
        return self.out_proj(force)


@dataclass
class Held:
    hidden: object


class Owning(nn.Module):
    """Holds its matrix itself, so that no module inside is seen giving anything out."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.randn(6, 6) * 0.3)
        self.kept: torch.Tensor | None = None


class BesideATensor(Owning):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Held]:
        return x.sum(), Held({"deep": Held(torch.relu(x @ self.proj))})


class OnItself(Owning):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = (x @ self.proj).square().mean()
        return torch.relu(x @ self.proj)


class Stack(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if isinstance(x, tuple):
                x = x[1].hidden["deep"].hidden
        return x


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Stack(CallsItself),
        lambda: Stack(AsksItself),
        CallsItself,
        AsksItself,
        Force,
        lambda: Stack(BesideATensor),
    ],
    ids=["calls itself", "asks itself", "root calls itself", "root asks itself", "force", "deep"],
)
def test_calls_inside_calls_and_hidden_outputs_equal_one_process(
    make: Callable[[], nn.Module], reshard: bool
) -> None:
    def body(rank: int) -> None:
        torch.manual_seed(0)
        alone = make()
        model, inputs = copy.deepcopy(alone), torch.randn(2, 2, 4, 6)
        dmuon.dedicate_params(model, make_mesh(2), is_proj, reshard_after_forward=reshard)
        optimizer, formula = dmuon.Muon(model, ns_dtype=torch.float32), formula_for(alone)
        for x in inputs:
            mean_square(model, x[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
            (sum(mean_square(alone, share) for share in x) / 2).backward()
            formula.step()
        expect_equal(model, alone)

    run_ranks(2, body)


def test_a_call_that_raised_inside_itself_keeps_nothing_whole_after_the_next_step() -> None:
    class Raises(CallsItself):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            if depth < 0:
                raise ValueError("too deep")
            return super().forward(x, depth)

    def body(rank: int) -> None:
        torch.manual_seed(0)
        model = Stack(Raises)
        dmuon.dedicate_params(model, make_mesh(2), is_proj)
        optimizer = dmuon.Muon(model)
        with pytest.raises(ValueError, match="too deep"):
            model.layers[0](torch.ones(2, 6), -1)
        for _ in range(2):
            mean_square(model, torch.ones(2, 6)).backward()
            optimizer.step()
            optimizer.zero_grad()
        mean_square(model, torch.ones(2, 6))
        owned = dmuon.get_owned_params(model)
        for name, param in dmuon.get_dedicated_params(model).items():
            if name.startswith("layers.0.") and name not in owned:
                assert param.untyped_storage().nbytes() == 4, f"{name} is still whole"

    run_ranks(2, body)


def test_a_backward_that_comes_without_weights_is_refused_by_name() -> None:
    """Otherwise all gradients before the block would be NaN."""

    def body(rank: int) -> None:
        torch.manual_seed(0)
        model = Stack(OnItself)
        dmuon.dedicate_params(model, make_mesh(2), is_proj)
        dmuon.Muon(model)
        model(torch.randn(4, 6))
        with pytest.raises(dmuon.OwnershipError, match=r"layers\.1\.proj through a tensor"):
            model.layers[1].kept.backward()  # of the last block weights would be there

    run_ranks(2, body)


def test_freezing_after_backward_leaves_the_gradients_that_are_there() -> None:
    """As in torch; the gradients may still be on their way, which must make no difference."""

    def body(rank: int) -> None:
        model, alone = wrap(build(), make_mesh(2)), build()
        optimizer, formula = dmuon.Muon(model, ns_dtype=torch.float32), formula_for(alone)
        for step in range(2):
            backward(model, step)
            for each in range(2):
                (loss_of(alone, share(tokens(step), each, 2)) / 2).backward()
            for name, param in [*model.named_parameters(), *alone.named_parameters()]:
                param.requires_grad_("q_proj" not in name)
            optimizer.step()
            optimizer.zero_grad()
            formula.step()
            model.requires_grad_(True)
            alone.requires_grad_(True)
        expect_equal(model, alone)

    run_ranks(2, body)


def test_thawing_what_nobody_averages_is_refused_at_any_step() -> None:
    def body(rank: int) -> None:
        model = build()
        for name, param in model.named_parameters():
            param.requires_grad_(is_proj(name, param))
        dmuon.dedicate_params(model, make_mesh(2), is_proj)
        optimizer = dmuon.Muon(model)
        for step in range(2):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        model.norm.weight.requires_grad_(True)
        backward(model, 2)
        with pytest.raises(dmuon.SetupError, match=r"norm\.weight was frozen and not sharded"):
            optimizer.step()

    run_ranks(2, body)


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, bias=False)
        self.modes = nn.Parameter(torch.randn(5, 4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.proj(x)[:, None] * self.modes - 1)


def test_complex_parameters_are_trained_and_clipped_as_in_one_process() -> None:
    def body(rank: int) -> None:
        torch.manual_seed(0)
        alone, mesh = Spectral(), make_mesh(2)
        model, inputs = copy.deepcopy(alone), torch.randn(3, 2, 3, 4)
        dmuon.dedicate_params(model, mesh, is_proj)
        fully_shard(model, mesh=mesh)
        optimizer, formula = dmuon.Muon(model, ns_dtype=torch.float32), formula_for(alone)
        formula.named = [each for each in formula.named if each[0] != "modes"]
        adamw = torch.optim.AdamW([alone.modes], weight_decay=0.01)
        for x in inputs:
            mean_square(model, x[rank]).backward()
            (sum(mean_square(alone, share) for share in x) / 2).backward()
            norm = dmuon.clip_grad_norm_(model, 0.1)
            expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            torch.testing.assert_close(norm, expected)
            optimizer.step()
            optimizer.zero_grad()
            adamw.step()
            formula.step()
            adamw.zero_grad()
            state = dmuon.get_optimizer_state_dict(model, optimizer)
            dmuon.set_optimizer_state_dict(model, optimizer, state if rank == 0 else {})
        expect_equal(model, alone)

    run_ranks(2, body)


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=str)
def test_gradients_dropped_by_hand_are_refused_for_those_of_owners_would_add_up(
    shape: tuple[int, ...],
) -> None:
    def body(rank: int) -> None:
        model = wrap(build(), make_mesh(*shape))
        optimizer = dmuon.Muon(model)
        backward(model, 0)
        optimizer.step()
        for param in model.parameters():
            param.grad = None
        backward(model, 1)
        before = dmuon.get_model_state_dict(model)
        with pytest.raises(dmuon.OwnershipError, match=r"dropped or replaced by hand"):
            optimizer.step()
        after = dmuon.get_model_state_dict(model)
        assert all(torch.equal(after[name], before[name]) for name in before)
        model.zero_grad()
        for step in range(2):
            backward(model, step)
            optimizer.step()
            model.zero_grad()

    run_ranks(2, body)


def test_steps_without_zero_grad_between_go_on_adding_up_as_in_torch() -> None:
    def body(rank: int) -> None:
        model, alone = wrap(build(), make_mesh(2)), build()
        optimizer, formula = dmuon.Muon(model, ns_dtype=torch.float32), formula_for(alone)
        total: dict[str, torch.Tensor] = {}
        for step in range(3):
            backward(model, step)
            optimizer.step()
            for each in range(2):
                (loss_of(alone, share(tokens(step), each, 2)) / 2).backward()
            for name, param in alone.named_parameters():
                param.grad = param.grad + total[name] if name in total else param.grad
                total[name] = param.grad
            formula.step()
        expect_equal(model, alone)

    run_ranks(2, body)


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=str)
def test_zero_grad_of_a_part_of_the_model_reaches_the_owners(shape: tuple[int, ...]) -> None:
    def body(rank: int) -> None:
        model, alone = wrap(build(), make_mesh(*shape)), build()
        optimizer, formula = dmuon.Muon(model, ns_dtype=torch.float32), formula_for(alone)
        backward(model, 0)
        for each in range(2):
            (loss_of(alone, share(tokens(0), each, 2)) / 2).backward()
        model.layers[0].zero_grad()
        alone.layers[0].zero_grad()
        optimizer.step()
        formula.step()
        expect_equal(model, alone)

    run_ranks(2, body)
