"""Training on many ranks equals training in one process."""

import copy

import pytest
import torch
from ranks_runner import run_ranks
from tiny import FormulaMuon, build, is_proj, loss_of, tokens
from torch import nn
from wrapped import make_mesh, prepare, train

import dmuon

STEPS = 6
CLASSIC = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024


def train_alone(model: nn.Module, optimizer: FormulaMuon, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, tokens(step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def polar_express(steps: int) -> list[tuple[float, float, float]]:
    return list(dmuon.POLAR_EXPRESS_COEFFICIENTS[:steps])


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize(
    "shape", [(1,), (2,), (3,), (4,), (1, 2), (2, 1), (2, 2)], ids=lambda s: "x".join(map(str, s))
)
def test_losses_and_weights_equal_one_process(shape: tuple[int, ...], reshard: bool) -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(*shape), reshard)
        optimizer = dmuon.Muon(model, weight_decay=0.1, ns_dtype=torch.float32)
        losses = train(model, optimizer, range(STEPS))
        state = dmuon.get_model_state_dict(model)

        alone = build()
        before = copy.deepcopy(alone.state_dict())
        formula = FormulaMuon(alone, weight_decay=0.1, coefficients=polar_express(5))
        expected = train_alone(alone, formula, range(STEPS))
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=2e-4)
        assert list(state) == list(alone.state_dict())
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=2e-3, msg=name)
            change, off = (value - before[name]).norm(), (state[name] - value).norm()
            assert off <= 1e-3 * change + 1e-7, f"{name}: changed by {change}, off by {off}"

    run_ranks(int(torch.tensor(shape).prod()), body)


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
def test_equals_torch_muon_within_what_bfloat16_explains(adjust: str, nesterov: bool) -> None:
    """torch.optim.Muon averages its momentum; Newton-Schulz is scale free, so updates are equal.

    It always computes in bfloat16: what that explains is its own distance to the formula.
    """

    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        same = {"nesterov": nesterov, "weight_decay": 0.1, "adjust_lr_fn": adjust}
        optimizer = dmuon.Muon(model, **same, ns_coefficients=CLASSIC, ns_dtype=torch.float32)
        train(model, optimizer, range(3))
        state = dmuon.get_model_state_dict(model)

        start = build().state_dict()
        by_formula = build()
        options = {"nesterov": nesterov, "weight_decay": 0.1, "adjust": adjust}
        formula = FormulaMuon(by_formula, coefficients=[CLASSIC] * 5, **options)
        train_alone(by_formula, formula, range(3))
        by_torch = build()
        named = dict(by_torch.named_parameters())
        hidden = [p for n, p in named.items() if is_proj(n, p)]
        muon = torch.optim.Muon(hidden, lr=0.02, momentum=0.95, **same)
        adamw = torch.optim.AdamW([p for n, p in named.items() if not is_proj(n, p)], lr=1e-3)
        for step in range(3):
            loss_of(by_torch, tokens(step)).backward()
            for each in (muon, adamw):
                each.step()
                each.zero_grad()
        exact = by_formula.state_dict()
        for name, value in by_torch.state_dict().items():
            change, explained = (value - start[name]).norm(), (value - exact[name]).norm()
            off = (state[name] - value).norm()
            assert explained <= 0.1 * change, name
            assert off <= 1.05 * explained + 1e-4 * change, f"{name}: {off} > {explained}"

    run_ranks(2, body)
