"""The optimizer's state goes to ``torch.optim`` and comes back, and training with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_runner import run_ranks
from tiny import build, is_proj, loss_of, tokens
from torch import nn
from wrapped import make_mesh, prepare, train, wrap

import dmuon
from dmuon import save_checkpoint

BEFORE, AFTER = range(4), range(4, 8)
CLASSIC = dmuon.CLASSIC_COEFFICIENTS
State = dict[str, Any]


def torch_optimizers(model: nn.Module, **muon: Any) -> tuple[torch.optim.Muon, torch.optim.AdamW]:
    named = dict(model.named_parameters())
    hidden = [param for name, param in named.items() if is_proj(name, param)]
    others = [param for name, param in named.items() if not is_proj(name, param)]
    # in another order than dmuon.Muon has them: names decide
    return torch.optim.Muon(hidden[::-1], **muon), torch.optim.AdamW(others[::-1])


def in_two_groups(optimizer: Any) -> Any:
    params = optimizer.param_groups[0]["params"]
    return type(optimizer)([{"params": params[:5]}, {"params": params[5:]}])


def train_alone(model: nn.Module, optimizers: tuple[Any, ...], steps: range) -> None:
    for step in steps:
        loss_of(model, tokens(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def assert_close(ours: State, theirs: State, start: State, off: float) -> None:
    """Each tensor is off by at most this part of how far it has come from ``start``."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        came = (value - start.get(name, 0)).norm()
        assert (ours[name] - value).norm() <= off * came, name


def momentum_of(model: nn.Module, muon: torch.optim.Muon) -> State:
    names = {param: name for name, param in model.named_parameters()}
    return {names[param]: state["momentum_buffer"] for param, state in muon.state.items()}


@pytest.fixture
def float32_newton_schulz(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.optim.Muon`` without its bfloat16, so that one step can be compared exactly."""

    def in_float32(grad: torch.Tensor, coefficients: Any, steps: int, eps: float) -> torch.Tensor:
        options = {"steps": steps, "coefficients": coefficients, "eps": eps}
        return dmuon.newton_schulz(grad, dtype=torch.float32, **options)

    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", in_float32)


SETTINGS = [
    {"adjust_lr_fn": "match_rms_adamw", "nesterov": True, "weight_decay": 0.1},
    {"adjust_lr_fn": "original", "nesterov": False, "momentum": 0.8, "ns_steps": 3, "eps": 0.5},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["nesterov", "plain"])
@pytest.mark.usefixtures("float32_newton_schulz")
def test_torch_goes_on_from_a_checkpoint_as_dmuon_would_have(
    settings: State, tmp_path: Path
) -> None:
    """``eps=0.5`` is larger than the norms here, so that it takes part in every update."""

    def body(rank: int) -> None:
        model = prepare(make_mesh(1))
        optimizer = dmuon.Muon(
            model, ns_coefficients=CLASSIC, ns_dtype=torch.float32, adamw_lr=2e-3, **settings
        )
        train(model, optimizer, BEFORE)
        save_checkpoint(tmp_path / "half", model, optimizer)
        half = dmuon.get_model_state_dict(model)
        train(model, optimizer, AFTER)
        expected = dmuon.get_model_state_dict(model)
        expected_state = dmuon.get_optimizer_state_dict(model, optimizer)

        dmuon.export_weights(tmp_path / "half", tmp_path / "half.pt")
        plain = build(seed=1)
        plain.load_state_dict(torch.load(tmp_path / "half.pt", weights_only=True))
        muon, adamw = (in_two_groups(each) for each in torch_optimizers(plain))
        state = dmuon.read_optimizer_state(tmp_path / "half")
        muon_state, adamw_state = dmuon.optimizer_state_to_torch(state, plain, muon, adamw)
        muon.load_state_dict(muon_state)
        adamw.load_state_dict(adamw_state)
        for key in ("lr", "momentum", "nesterov", "weight_decay", "ns_steps", "adjust_lr_fn"):
            assert muon.param_groups[0][key] == optimizer.param_groups[0][key], key
        assert adamw.param_groups[0]["lr"] == 2e-3
        train_alone(plain, (muon, adamw), AFTER)
        assert_close(plain.state_dict(), expected, half, off=2e-4)
        factor = 1 - optimizer.param_groups[0]["momentum"]
        averages = {
            name: factor * state["momentum_buffer"]
            for name, state in expected_state["dedicated"].items()
        }
        assert_close(momentum_of(plain, muon), averages, {}, off=2e-4)

    run_ranks(1, body)


@pytest.mark.parametrize("settings", SETTINGS, ids=["nesterov", "plain"])
@pytest.mark.usefixtures("float32_newton_schulz")
def test_dmuon_goes_on_from_torch_as_torch_would_have(settings: State) -> None:
    def body(rank: int) -> None:
        plain = build()
        muon, adamw = torch_optimizers(plain, lr=0.02, **{"weight_decay": 0.0, **settings})
        train_alone(plain, (muon, adamw), BEFORE)
        half = {name: value.clone() for name, value in plain.state_dict().items()}
        state = dmuon.optimizer_state_from_torch(plain, muon, adamw)
        arguments = dmuon.muon_settings_from_torch(muon, adamw)
        train_alone(plain, (muon, adamw), AFTER)

        model = build(seed=1)
        model.load_state_dict(half)
        model = wrap(model, make_mesh(1))
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32, **arguments)
        dmuon.set_optimizer_state_dict(model, optimizer, state)
        assert optimizer.num_steps == len(BEFORE)
        train(model, optimizer, AFTER)
        assert_close(dmuon.get_model_state_dict(model), plain.state_dict(), half, off=2e-4)

    run_ranks(1, body)


def test_with_torchs_own_bfloat16_the_momentum_is_the_same_and_weights_are_near(
    tmp_path: Path,
) -> None:
    """The gradients of the first step are equal on both sides, so the momentum is exactly so."""

    def body(rank: int) -> None:
        model = prepare(make_mesh(1))
        optimizer = dmuon.Muon(model, ns_coefficients=CLASSIC, ns_dtype=torch.float32)
        train(model, optimizer, BEFORE)
        half = dmuon.get_model_state_dict(model)
        state = dmuon.get_optimizer_state_dict(model, optimizer)
        one = range(AFTER.start, AFTER.start + 1)
        train(model, optimizer, one)
        expected = dmuon.get_model_state_dict(model)
        after = dmuon.get_optimizer_state_dict(model, optimizer)["dedicated"]

        plain = build()
        plain.load_state_dict(half)
        muon, adamw = torch_optimizers(plain)
        states = dmuon.optimizer_state_to_torch(state, plain, muon, adamw)
        muon.load_state_dict(states[0])
        adamw.load_state_dict(states[1])
        train_alone(plain, (muon, adamw), one)
        averages = {name: 0.05 * each["momentum_buffer"] for name, each in after.items()}
        assert_close(momentum_of(plain, muon), averages, {}, off=2e-6)
        assert_close(plain.state_dict(), expected, half, off=0.1)  # as test_oracle.py

    run_ranks(1, body)


def trained_state(**settings: Any) -> State:
    """What an optimizer of ours says after a step, written down by hand."""
    model = build()
    muon, adamw = torch_optimizers(model)
    train_alone(model, (muon, adamw), range(1))
    state = dmuon.optimizer_state_from_torch(model, muon, adamw)
    group = {"lr": 0.02, "momentum": 0.95, "nesterov": True, "weight_decay": 0.0, "ns_steps": 5}
    group |= {"ns_coefficients": CLASSIC, "adjust_lr_fn": "original", "eps": 1e-7, **settings}
    others = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    state["param_groups"] = [
        {"algorithm": "muon", "names": sorted(state["dedicated"]), **group},
        {"algorithm": "adamw", "names": sorted(state["fsdp2"]), **others},
    ]
    return state


def to_torch(state: State, **options: Any) -> tuple[State, State]:
    model = build()
    return dmuon.optimizer_state_to_torch(state, model, *torch_optimizers(model), **options)


def test_there_and_back_is_the_same_state() -> None:
    state = trained_state()
    model = build()
    muon, adamw = torch_optimizers(model)
    muon_state, adamw_state = dmuon.optimizer_state_to_torch(state, model, muon, adamw)
    muon.load_state_dict(muon_state)
    adamw.load_state_dict(adamw_state)
    again = dmuon.optimizer_state_from_torch(model, muon, adamw)
    for section in ("dedicated", "fsdp2"):
        assert again[section].keys() == state[section].keys()
        for name, values in state[section].items():
            for key, value in values.items():
                torch.testing.assert_close(again[section][name][key], value, rtol=2e-7, atol=0)
    assert again["num_steps"] == 1


def test_one_triple_a_step_is_refused_until_it_is_said_how_to_go_on() -> None:
    state = trained_state(ns_coefficients=dmuon.POLAR_EXPRESS_COEFFICIENTS)
    with pytest.raises(dmuon.StateDictError, match=r"ns_coefficients=dmuon\.CLASSIC"):
        to_torch(state)
    muon_state, _ = to_torch(state, ns_coefficients=CLASSIC)
    assert muon_state["param_groups"][0]["ns_coefficients"] == CLASSIC
    repeated = trained_state(ns_coefficients=(CLASSIC, CLASSIC))
    assert to_torch(repeated)[0]["param_groups"][0]["ns_coefficients"] == CLASSIC


def without_rate_adjustment(state: State) -> None:
    state["param_groups"][0]["adjust_lr_fn"] = None


def two_momenta(state: State) -> None:
    first = state["param_groups"][0]
    second = {**first, "names": [first["names"].pop()], "momentum": 0.5}
    state["param_groups"].append(second)


def other_parameter(state: State) -> None:
    state["dedicated"]["strange.weight"] = state["dedicated"]["layers.0.q_proj.weight"]


def moved_to_adamw(state: State) -> None:
    state["param_groups"][1]["names"].append(state["param_groups"][0]["names"].pop())


def without_groups(state: State) -> None:
    del state["param_groups"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_rate_adjustment, "torch.optim.Muon always adjusts the rate"),
        (two_momenta, "momentum.*differ in the state"),
        (other_parameter, "strange.weight: in neither of the two optimizers"),
        (moved_to_adamw, "is trained by adamw in the state, not muon"),
        (without_groups, "param_groups: missing"),
    ],
)
def test_what_has_no_counterpart_in_torch_is_refused(
    change: Callable[[State], None], words: str
) -> None:
    state = trained_state()
    change(state)
    with pytest.raises(dmuon.StateDictError, match=words):
        to_torch(state)


def test_what_dmuon_does_not_know_is_refused() -> None:
    model = build()
    muon, _ = torch_optimizers(model)
    others = [param for name, param in model.named_parameters() if not is_proj(name, param)]
    adamw = torch.optim.AdamW([*others, nn.Parameter(torch.zeros(1))], amsgrad=True)
    with pytest.raises(dmuon.StateDictError) as caught:
        dmuon.optimizer_state_from_torch(model, muon, adamw)
    assert "amsgrad=True" in str(caught.value)
    assert "not one of this model" in str(caught.value)


def test_a_checkpoint_of_weights_alone_has_no_optimizer_state(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        save_checkpoint(tmp_path / "weights", prepare(make_mesh(1)))
        with pytest.raises(dmuon.CheckpointError, match="only weights"):
            dmuon.read_optimizer_state(tmp_path / "weights")

    run_ranks(1, body)
