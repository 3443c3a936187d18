"""Settings printed for those who come from other Muons, beside what those do by default.

Each formula is written here as its source has it: the order of operations, an average where it
averages, its own scale and where its epsilon goes; in float32, so that steps can be compared.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from printed import ROOT, block
from ranks_runner import run_ranks
from tiny import build, is_proj, loss_of, tokens
from torch import nn
from torch.distributed.fsdp import fully_shard
from wrapped import make_mesh

import dmuon
from dmuon.argument_names import explain

MOVING = "dmuon/MOVING.md"
STEPS = 5
PRINTED: dict[str, Any] = {}
exec(block(MOVING, "equivalents", "python"), PRINTED)
exec(block(MOVING, "by shape", "python"), PRINTED)

Triple = tuple[float, float, float]
CLASSIC: list[Triple] = [(3.4445, -4.7750, 2.0315)] * 5
QUINTIC: list[Triple] = [
    *[(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037)],
    *[(2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)],
]


class Other(NamedTuple):
    """A Muon as its source has it; ``scale`` is of the shape ``m x n``."""

    lr: float
    weight_decay: float
    averages: bool
    nesterov: bool
    coefficients: Sequence[Triple]
    scale: Callable[[int, int], float]
    eps: float
    adds_eps: bool


def original(m: int, n: int) -> float:
    return math.sqrt(max(1, m / n))


def longest(m: int, n: int) -> float:
    return math.sqrt(max(m, n))


OTHERS = {
    "torch": Other(1e-3, 0.1, True, True, CLASSIC, original, 1e-7, False),
    "keller_jordan": Other(0.02, 0.0, True, True, CLASSIC, original, 1e-7, True),
    "muon_fsdp2": Other(
        0.02, 0.0, True, True, CLASSIC, lambda m, n: 0.2 * longest(m, n), 1e-7, True
    ),
    "megatron": Other(3e-4, 0.01, True, True, QUINTIC, longest, 1e-7, False),
    "dion_rms_norm": Other(
        0.01, 0.01, False, False, QUINTIC, lambda m, n: 0.2 * longest(m, n), 1e-8, True
    ),
    "dion": Other(0.01, 0.01, False, False, QUINTIC, lambda m, n: math.sqrt(m / n), 1e-8, True),
}
BY_SHAPE = {"nesterov": False, "ns_coefficients": QUINTIC, "momentum": 0.95, "eps": 1e-8}


def orthogonal(update: torch.Tensor, other: Other) -> torch.Tensor:
    X = update.T if update.shape[0] > update.shape[1] else update
    norm = X.norm()
    X = X / (norm + other.eps if other.adds_eps else norm.clamp(min=other.eps))
    for a, b, c in other.coefficients:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if update.shape[0] > update.shape[1] else X


@torch.no_grad()
def step(model: nn.Module, other: Other, buffers: dict[str, torch.Tensor]) -> None:
    """On hidden matrices; the rest stays as it is."""
    for name, param in model.named_parameters():
        if is_proj(name, param):
            buffer = buffers.setdefault(name, torch.zeros_like(param))
            if other.averages:
                buffer.lerp_(param.grad, 0.05)
                update = param.grad.lerp(buffer, 0.95) if other.nesterov else buffer
            else:
                buffer.mul_(0.95).add_(param.grad)
                update = param.grad + 0.95 * buffer if other.nesterov else buffer
            param.mul_(1 - other.lr * other.weight_decay)
            param.sub_(other.lr * other.scale(*param.shape) * orthogonal(update, other))
        param.grad = None


@pytest.mark.parametrize("name", OTHERS)
def test_the_printed_settings_do_what_the_other_muon_does_by_default(name: str) -> None:
    def body(rank: int) -> None:
        mesh, model = make_mesh(2), build()
        dmuon.dedicate_params(model, mesh, is_proj)
        fully_shard(model, mesh=mesh)
        settings = {"adamw_lr": 0.0, "ns_dtype": torch.float32}
        if name == "dion":
            groups = PRINTED["by_shape"](model, lr=0.01, weight_decay=0.01)
            optimizer = dmuon.Muon(model, param_groups=groups, **BY_SHAPE, **settings)
        else:
            optimizer = dmuon.Muon(model, **PRINTED["equivalents"][name], **settings)
        alone, buffers = build(), {}
        for number in range(STEPS):
            for each in (model, alone):
                loss_of(each, tokens(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
            step(alone, OTHERS[name], buffers)
        start, state = build().state_dict(), dmuon.get_model_state_dict(model)
        for key, value in alone.state_dict().items():
            came = (value - start[key]).norm()
            assert (state[key] - value).norm() <= 1e-3 * came, key
        kept = dmuon.get_optimizer_state_dict(model, optimizer)["dedicated"]
        factor = 0.05 if OTHERS[name].averages else 1.0
        for key, buffer in buffers.items():
            ours = factor * kept[key]["momentum_buffer"]
            torch.testing.assert_close(ours, buffer, rtol=1e-3, atol=1e-6)

    run_ranks(2, body)


def test_torchs_own_optimizer_is_what_its_formula_here_says() -> None:
    """In bfloat16, as it has it, so within a few percent of the change."""
    ours, theirs, buffers = build(), build(), {}
    hidden = [param for name, param in theirs.named_parameters() if is_proj(name, param)]
    muon = torch.optim.Muon(hidden)
    for number in range(STEPS):
        for each in (ours, theirs):
            loss_of(each, tokens(number)).backward()
        muon.step()
        theirs.zero_grad()
        step(ours, OTHERS["torch"], buffers)
    start = build().state_dict()
    for key, value in theirs.state_dict().items():
        came = (value - start[key]).norm()
        assert (ours.state_dict()[key] - value).norm() <= 0.05 * came, key


@pytest.mark.parametrize("shape", [(128, 128), (352, 128), (128, 512)])
def test_updates_of_other_coefficients_are_as_much_smaller_as_is_printed(
    shape: tuple[int, int],
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def size(coefficients: Any) -> float:
        update = dmuon.newton_schulz(matrix, coefficients=coefficients, dtype=torch.float32)
        return update.norm().item()

    polar_express = size(dmuon.POLAR_EXPRESS_COEFFICIENTS)
    assert 0.86 <= size(dmuon.CLASSIC_COEFFICIENTS) / polar_express <= 0.9
    assert 0.97 <= size(QUINTIC) / polar_express <= 1.03


def names_in_the_table() -> Iterator[tuple[str, str]]:
    """Each argument of another Muon, and the one here of which the row says that it is the same."""
    rows = re.findall(r"^\| `(\w+)[^|]*\|(.*)$", (ROOT / MOVING).read_text("utf-8"), re.M)
    for ours, others in rows:
        yield from ((name, ours) for name in re.findall(r"`(\w+)=", others) if name != ours)


def test_arguments_by_their_names_elsewhere_are_refused_with_those_here() -> None:
    found = list(names_in_the_table())
    assert {("mu", "momentum"), ("scale_mode", "adjust_lr_fn"), ("epsilon", "eps")} <= set(found)
    for name, ours in found:
        with pytest.raises(dmuon.SetupError, match=f"{name} is {ours} here"):
            dmuon.Muon(nn.Linear(2, 2), **{name: None})


def test_names_that_are_none_are_shown_and_cut() -> None:
    known = ("lr", "momentum")
    told = explain("here", [1, None, "a\nb", "x" * 1000, "momentun"], known)
    assert "1 is unknown; None is unknown; 'a\\nb' is unknown" in told
    assert "momentun is unknown, the nearest is momentum" in told
    assert len(told) < 400


@pytest.mark.parametrize("other", [torch.optim.AdamW, torch.optim.Muon])
def test_no_argument_of_torchs_optimizers_is_unknown(other: type[torch.optim.Optimizer]) -> None:
    names = inspect.signature(other).parameters
    assert len(names) > 5
    with pytest.raises(dmuon.SetupError, match="params is the model itself here") as caught:
        dmuon.Muon(**dict.fromkeys(names))
    assert "unknown" not in str(caught.value)
