"""What cannot be right is refused by name, on every rank, instead of being wrong in silence."""

import copy
import io
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from ranks_runner import run_ranks
from tiny import build, is_proj, loss_of, share, tokens
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from wrapped import backward, make_mesh, prepare

import dmuon

Attempt = Callable[[nn.Module, dmuon.Muon], object]


def refuse(error: type[Exception], match: str, attempt: Attempt, world_size: int = 1) -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(world_size))
        optimizer = dmuon.Muon(model)
        with pytest.raises(error, match=match):
            attempt(model, optimizer)

    run_ranks(world_size, body)


def test_a_predicate_that_fails_on_one_rank_fails_on_all_and_nobody_waits() -> None:
    def body(rank: int) -> None:
        def choose(name: str, param: nn.Parameter) -> bool:
            if rank == 1:
                raise KeyError("broken on purpose")
            return is_proj(name, param)

        error, match = [(dmuon.SetupError, "rank 1 of the mesh failed.*purpose"), (KeyError, "")][
            rank
        ]
        with pytest.raises(error, match=match):
            dmuon.dedicate_params(build(), make_mesh(2), choose, timeout=timedelta(seconds=20))

    run_ranks(2, body, timeout_s=10)


def test_dedicating_a_part_of_a_dedicated_model() -> None:
    def body(rank: int) -> None:
        model = build()
        dmuon.dedicate_params(model, make_mesh(1), predicate=is_proj)
        with pytest.raises(dmuon.SetupError, match="dedicated parameters already"):
            dmuon.dedicate_params(model.layers[0], make_mesh(1), predicate=is_proj)

    run_ranks(1, body)


def test_fully_shard_on_another_mesh() -> None:
    def body(rank: int) -> None:
        model, mesh = build(), make_mesh(2, 2)
        dmuon.dedicate_params(model, mesh, predicate=is_proj)
        fully_shard(model, mesh=mesh["shard"])
        with pytest.raises(dmuon.SetupError, match="give both the same mesh"):
            dmuon.Muon(model)

    run_ranks(4, body)


def test_fully_shard_after_the_model_was_used() -> None:
    def body(rank: int) -> None:
        model = build()
        dmuon.dedicate_params(model, make_mesh(1), predicate=is_proj)
        model.zero_grad()  # no use yet
        loss_of(model, tokens(0))
        fully_shard(model, mesh=make_mesh(1))
        with pytest.raises(dmuon.SetupError, match="right after dedicate_params"):
            dmuon.Muon(model)

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"model": [1]}, "must be a torch.nn.Module, got list"),
        ({"predicate": "proj"}, "functions of"),
        ({"mp_policy": "bf16"}, "MixedPrecisionPolicy, got 'bf16'"),
        ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.int8)}, "floating-point"),
        ({"replicate_mesh": "x"}, "replicate_mesh must be a DeviceMesh"),
    ],
    ids=str,
)
def test_arguments_of_the_wrong_type(arguments: dict[str, object], match: str) -> None:
    def body(rank: int) -> None:
        with pytest.raises(dmuon.SetupError, match=match):
            dmuon.dedicate_params(**{"model": build(), "mesh": make_mesh(1), **arguments})  # type: ignore[arg-type]

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"lr": None}, "lr must be a number of at least 0, got None"),
        ({"lr": float("inf")}, "lr must be"),
        ({"momentum": "0.9"}, "momentum must be a number in"),
        ({"ns_coefficients": 3}, "ns_coefficients must be"),
        ({"param_groups": [3]}, "must be a dictionary, got int"),
        ({"param_groups": [{"params": None}]}, "must be a list"),
        ({"param_groups": [{"params": {"norm.weight"}}]}, "order is the same on all ranks"),
        ({"param_groups": [{"params": [5]}]}, r"not one of this model \(5\)"),
    ],
    ids=str,
)
def test_settings_of_the_wrong_type(settings: dict[str, object], match: str) -> None:
    refuse(dmuon.SetupError, match, lambda model, _: dmuon.Muon(model, **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "copy_it",
    [
        lambda model, optimizer: copy.deepcopy(model),
        lambda model, optimizer: torch.save(model, io.BytesIO()),
        lambda model, optimizer: copy.deepcopy(model.layers[0]),
        lambda model, optimizer: copy.deepcopy(optimizer),
        lambda model, optimizer: torch.save(optimizer, io.BytesIO()),
    ],
    ids=["model", "saved model", "layer", "optimizer", "saved optimizer"],
)
def test_copies_and_pickles(copy_it: Attempt) -> None:
    def body(rank: int) -> None:
        model = build()
        dmuon.dedicate_params(model, make_mesh(1), predicate=is_proj)
        optimizer = dmuon.Muon(model)
        with pytest.raises(dmuon.OwnershipError, match="cannot be copied"):
            copy_it(model, optimizer)

    run_ranks(1, body)


def test_a_group_added_later() -> None:
    group = {"params": [nn.Parameter(torch.ones(2))]}
    refuse(
        dmuon.OwnershipError, "added later", lambda m, optimizer: optimizer.add_param_group(group)
    )


def test_gradient_scaling() -> None:
    scaler = torch.amp.GradScaler("cpu")

    def attempt(model: nn.Module, optimizer: dmuon.Muon) -> None:
        scaler.scale(loss_of(model, tokens(0))).backward()
        scaler.step(optimizer)

    refuse(dmuon.OwnershipError, "GradScaler", attempt)


def test_a_step_while_gradients_wait_under_no_sync() -> None:
    def attempt(model: nn.Module, optimizer: dmuon.Muon) -> None:
        with dmuon.no_sync(model):
            backward(model, 0)
        with pytest.raises(dmuon.OwnershipError, match="no_sync"):
            dmuon.clip_grad_norm_(model, 1.0)
        optimizer.step()

    refuse(dmuon.OwnershipError, "no_sync", attempt, 2)


def test_a_backward_after_the_weights_changed() -> None:
    def attempt(model: nn.Module, optimizer: dmuon.Muon) -> None:
        loss = loss_of(model, share(tokens(0), 0, 2))
        backward(model, 1)
        optimizer.step()
        loss.backward()

    refuse(dmuon.OwnershipError, "changed between forward and backward", attempt, 2)


def test_second_derivatives() -> None:
    def attempt(model: nn.Module, optimizer: dmuon.Muon) -> None:
        loss_of(model, tokens(0)).backward(create_graph=True)

    refuse(dmuon.OwnershipError, "create_graph=True", attempt, 2)


def test_a_first_forward_in_inference_mode_beside_fully_shard() -> None:
    def attempt(model: nn.Module, optimizer: dmuon.Muon) -> None:
        with torch.inference_mode():
            loss_of(model, tokens(0))

    refuse(dmuon.OwnershipError, "torch.no_grad", attempt, 2)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"norm.weight": torch.ones(24)},
        {"dedicated": {"layers.0.q_proj.weight": {"momentum": torch.ones(24, 24)}}},
        {"dedicated": {}, "param_groups": [3]},
    ],
    ids=["empty", "of the model", "unknown state", "bad groups"],
)
def test_optimizer_dicts_that_are_none(state: dict[str, object]) -> None:
    def attempt(model: nn.Module, optimizer: dmuon.Muon) -> None:
        dmuon.set_optimizer_state_dict(model, optimizer, state)

    refuse(dmuon.StateDictError, "optimizer state dict does not fit", attempt)


def test_ranks_that_hold_different_dicts_load_nothing_even_without_strict() -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        state = build(5).state_dict() if rank == 1 else {}
        with pytest.raises(dmuon.StateDictError, match=r"ranks \[1\] of the mesh hold other"):
            dmuon.set_model_state_dict(model, state, strict=False)

    run_ranks(2, body)


def test_state_dict_hooks_that_rename_what_has_an_owner() -> None:
    def attempt(model: nn.Module, optimizer: dmuon.Muon) -> None:
        def rename(module: nn.Module, state: dict[str, object], *_: object) -> None:
            for name in list(state):
                state[f"old.{name}"] = state.pop(name)

        model._register_state_dict_hook(rename)
        dmuon.get_model_state_dict(model)

    refuse(dmuon.OwnershipError, "state_dict hook", attempt, 2)


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_a_norm_that_would_turn_gradients_around(max_norm: float) -> None:
    refuse(ValueError, "max_norm", lambda model, _: dmuon.clip_grad_norm_(model, max_norm))


@pytest.mark.parametrize("matrix", [torch.ones(3), torch.ones(0, 3), [[1.0]]], ids=str)
def test_newton_schulz_of_no_matrix(matrix: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="needs a matrix"):
        dmuon.newton_schulz(matrix)
