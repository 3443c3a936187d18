"""Parameters that hold several matrices: each is updated alone, against one process."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import (
    NUM_MATRICES,
    FormulaByHand,
    build_many,
    is_by_hand,
    wrap_many,
)
from ranks_runner import run_ranks
from tiny import FormulaMuon, build, is_proj, loss_of, tokens
from torch import nn
from torch.distributed.fsdp import fully_shard
from wrapped import make_mesh, train

import dmuon

POLAR_EXPRESS = list(dmuon.POLAR_EXPRESS_COEFFICIENTS[:5])
MESHES = pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=lambda s: "x".join(map(str, s)))


def size(shape: tuple[int, ...]) -> int:
    return int(torch.tensor(shape).prod())


@MESHES
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_training_equals_one_process(shape: tuple[int, ...], adjust: str) -> None:
    def body(rank: int) -> None:
        model = build_many()
        plan = wrap_many(model, make_mesh(*shape))
        optimizer = dmuon.Muon(
            model, weight_decay=0.1, adjust_lr_fn=adjust, lr=0.01, ns_dtype=torch.float32
        )
        train(model, optimizer, range(4))
        alone = build_many()
        start = copy.deepcopy(alone.state_dict())
        formula = FormulaByHand(
            alone,
            is_muon=is_by_hand,
            lr=0.01,
            weight_decay=0.1,
            adjust=adjust,
            coefficients=POLAR_EXPRESS,
        )
        for step in range(4):
            loss_of(alone, tokens(step)).backward()
            formula.step()
        state = dmuon.get_model_state_dict(model)
        assert list(state) == list(start)
        for name, value in alone.state_dict().items():
            assert state[name].shape == start[name].shape
            change, off = (value - start[name]).norm(), (state[name] - value).norm()
            assert off <= 1e-3 * change + 1e-6, f"{name}: changed by {change}, off by {off}"
        idle = "layers.0.experts.down_proj"  # its last expert never got a token, so it only decays
        torch.testing.assert_close(state[idle][-1], start[idle][-1] * (1 - 0.01 * 0.1) ** 4)
        assert sum(plan.num_matrices_per_owner) == NUM_MATRICES
        assert dmuon.get_counters(model).newton_schulz == 4 * plan.num_matrices_per_owner[rank]

    run_ranks(size(shape), body)


State = dict[str, dict[str, dict[str, torch.Tensor]]]


def dicts(model: nn.Module, optimizer: dmuon.Muon) -> State:
    """Collective."""
    state = dmuon.get_optimizer_state_dict(model, optimizer)
    return {"model": {"": dmuon.get_model_state_dict(model)}, **state}


def test_state_dicts_keep_their_shapes_and_continue_on_another_mesh(tmp_path: Path) -> None:
    shapes = {name: value.shape for name, value in build_many().state_dict().items()}

    def first(rank: int) -> None:
        model = build_many()
        wrap_many(model, make_mesh(2))
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        train(model, optimizer, range(2))
        saved = dicts(model, optimizer)
        assert {name: value.shape for name, value in saved["model"][""].items()} == shapes
        momenta = {name: state["momentum_buffer"] for name, state in saved["dedicated"].items()}
        assert set(momenta) == set(dmuon.get_dedicated_params(model))
        assert all(momentum.shape == shapes[name] for name, momentum in momenta.items())
        train(model, optimizer, range(2, 4))
        after = dicts(model, optimizer)
        if rank == 0:
            torch.save((saved, after), tmp_path / "states")

    def second(rank: int) -> None:
        saved, after = torch.load(tmp_path / "states")
        model = build_many(seed=1)
        wrap_many(model, make_mesh(2, 2))
        optimizer = dmuon.Muon(model, lr=0.5)
        dmuon.set_model_state_dict(model, saved["model"][""])
        dmuon.set_optimizer_state_dict(model, optimizer, saved)
        again = dicts(model, optimizer)
        for section in ("model", "fsdp2", "dedicated"):
            torch.testing.assert_close(again[section], saved[section], rtol=0, atol=0)
        train(model, optimizer, range(2, 4))
        for name, value in dmuon.get_model_state_dict(model).items():
            expected = after["model"][""][name]
            change = (expected - saved["model"][""][name]).norm()
            assert (value - expected).norm() <= 1e-3 * change + 1e-6, name

    run_ranks(2, first)
    run_ranks(4, second)


class Given(nn.Module):
    """Parameters whose gradients are what is given: bit for bit, on every rank."""

    def __init__(self, **weights: torch.Tensor) -> None:
        super().__init__()
        self.layers = nn.ParameterDict({k: nn.Parameter(v.clone()) for k, v in weights.items()})

    def forward(self, grads: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((self.layers[name] * grad).sum() for name, grad in grads.items())  # type: ignore[return-value]


def updated(
    weights: dict[str, torch.Tensor],
    grads: list[dict[str, torch.Tensor]],
    split: dmuon.Split | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Weights after one step a gradient, with momentum and decay. Collective."""
    model = Given(**weights)
    dmuon.dedicate_params(model, make_mesh(2), lambda n, p: True, splits=lambda n, p: split)
    optimizer = dmuon.Muon(model, weight_decay=0.1, **options)
    for grad in grads:
        model(grad).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {k.removeprefix("layers."): v for k, v in dmuon.get_model_state_dict(model).items()}


@pytest.mark.parametrize("sides", [(12, 20), (20, 12), (9, 13)], ids=str)
def test_a_stack_is_updated_as_its_experts_would_be_alone(sides: tuple[int, int]) -> None:
    def body(rank: int) -> None:
        torch.manual_seed(0)
        weight_EMN, *grads_EMN = (torch.randn(5, *sides) for _ in range(4))
        grads_EMN[1][2] = 0  # an expert without a token, once
        together = updated({"stack": weight_EMN}, [{"stack": grad} for grad in grads_EMN])
        alone = updated(
            {str(e): weight for e, weight in enumerate(weight_EMN)},
            [{str(e): grad for e, grad in enumerate(grad_EMN)} for grad_EMN in grads_EMN],
        )
        for expert, value in enumerate(together["stack"]):
            assert torch.equal(value, alone[str(expert)])
            assert not torch.equal(value, weight_EMN[expert])

    run_ranks(2, body)


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_a_loud_head_does_not_change_the_updates_of_the_others(dim: int) -> None:
    def body(rank: int) -> None:
        torch.manual_seed(0)
        shape = (24, 40) if dim == 0 else (40, 24)
        weight, *grads = (torch.randn(shape) for _ in range(3))
        loud = torch.ones(3)
        loud[1] = 100
        loud = loud.repeat_interleave(8).unsqueeze(1 - dim)

        def heads(scale: torch.Tensor | float, split: dmuon.Split | None) -> list[torch.Tensor]:
            given = [{"qkv": grad * scale} for grad in grads]
            return list(updated({"qkv": weight}, given, split)["qkv"].chunk(3, dim))

        def others(heads: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([heads[0], heads[2]])

        before = others(list(weight.chunk(3, dim)))
        split = dmuon.Split(8, dim)
        assert torch.equal(others(heads(1.0, split)), others(heads(loud, split)))
        whole, beside_loud = others(heads(1.0, None)), others(heads(loud, None))
        assert (whole - beside_loud).norm() > 0.1 * (whole - before).norm()

    run_ranks(2, body)


def test_parameters_are_updated_the_same_whatever_shares_their_group() -> None:
    def body(rank: int) -> None:
        torch.manual_seed(0)
        names = [str(number) for number in range(6)]
        weights, *grads = ({name: torch.randn(9, 13) for name in names} for _ in range(3))
        together = updated(weights, grads)
        apart = [{"params": [f"layers.{name}"]} for name in names]
        alone = updated(weights, grads, param_groups=apart)
        assert all(torch.equal(together[name], alone[name]) for name in names)

    run_ranks(2, body)


def refuse(match: str, attempt: Callable[[int], object]) -> None:
    def body(rank: int) -> None:
        with pytest.raises(dmuon.SetupError, match=match):
            attempt(rank)

    run_ranks(2, body)


def dedicate(splits: object) -> dmuon.Plan:
    return dmuon.dedicate_params(build(), make_mesh(2), is_proj, splits=splits)  # type: ignore[arg-type]


UP = "layers.1.up_proj.weight"


@pytest.mark.parametrize(
    ("splits", "match"),
    [
        ({UP: dmuon.Split(5)}, "splits are functions"),
        ({}, "splits are functions"),
        (lambda n, p: (50,), r"returned \(50,\) for embed\.weight; it must return a dmuon\.Split"),
        (
            lambda n, p: dmuon.Split(5) if "up" in n or n == "embed.weight" else None,
            r"rows split in parts of 5 for embed\.weight, which is not dedicated",
        ),
        (
            lambda n, p: dmuon.Split((20, 20)) if n == UP else None,
            r"up_proj\.weight has shape \(50, 24\).*50 rows.*\(20, 20\).*add up to 40",
        ),
        (lambda n, p: dmuon.Split(0), "positive whole numbers"),
    ],
)
def test_wrong_splits_are_refused_on_every_rank(splits: object, match: str) -> None:
    refuse(match, lambda rank: dedicate(splits))


def test_splits_that_differ_between_ranks_are_refused_on_every_rank() -> None:
    def attempt(rank: int) -> None:
        dedicate(lambda n, p: dmuon.Split((30, 20) if rank else (20, 30)) if n == UP else None)

    refuse(r"up_proj\.weight .*rows split in 30 \+ 20 instead of .*rows split in 20 \+ 30", attempt)


def test_splits_that_raise_on_one_rank_are_an_error_on_every_rank() -> None:
    def body(rank: int) -> None:
        def raising(name: str, param: nn.Parameter) -> None:
            if rank == 1 and name == UP:
                raise KeyError("not in my table")

        error = KeyError if rank == 1 else dmuon.SetupError
        with pytest.raises(error, match="not in my table"):
            dedicate(raising)
        dedicate(None)  # nothing was dedicated by the failed calls

    run_ranks(2, body)


def mixtral() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        vocab_size=41,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    return transformers.MixtralForCausalLM(config)


def test_a_mixture_of_experts_of_transformers_equals_one_process() -> None:
    def body(rank: int) -> None:
        alone = mixtral()
        start = copy.deepcopy(alone.state_dict())
        model = copy.deepcopy(alone)
        mesh = make_mesh(2)
        dmuon.dedicate_params(model, mesh)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        dedicated = dmuon.get_dedicated_params(model)
        assert sum(param.ndim == 3 for param in dedicated.values()) == 4
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        formula = FormulaMuon(
            alone,
            is_muon=lambda name, param: name in dedicated,
            coefficients=POLAR_EXPRESS,
        )
        for step in range(3):
            rows = tokens(step)
            part = rows.chunk(2)[rank]
            model(input_ids=part, labels=part).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            alone(input_ids=rows, labels=rows).loss.backward()
            formula.step()
        state = dmuon.get_model_state_dict(model)
        for name, value in alone.state_dict().items():
            change, off = (value - start[name]).norm(), (state[name] - value).norm()
            assert off <= 1e-3 * change + 1e-6, f"{name}: changed by {change}, off by {off}"

    mixtral()  # imported before the ranks fork
    run_ranks(2, body)


def test_a_module_registered_twice_has_both_its_names_in_state_dicts() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6, bias=False)
            self.second = self.first

    def body(rank: int) -> None:
        model = Twice()
        start = copy.deepcopy(model.state_dict())
        dmuon.dedicate_params(model, make_mesh(2))
        state = dmuon.get_model_state_dict(model)
        torch.testing.assert_close(state, start, rtol=0, atol=0)
        dmuon.set_model_state_dict(model, {name: value + 1 for name, value in start.items()})
        again = dmuon.get_model_state_dict(model)
        assert all(torch.equal(again[name], value + 1) for name, value in start.items())

    torch.manual_seed(0)
    run_ranks(2, body)
