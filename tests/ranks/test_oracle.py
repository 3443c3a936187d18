"""Training on many ranks equals training in one process."""

import math
from typing import Any

import pytest
import torch
from exact import assert_follows, assert_identical
from ranks_runner import run_ranks
from tiny import FormulaMuon, build, is_proj, loss_of, tokens
from torch import nn
from wrapped import make_mesh, prepare, train

import dmuon
from dmuon.packing import Packing

STEPS = 3
CLASSIC = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024

State = dict[str, Any]


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


@pytest.mark.parametrize(
    "shape",
    [(1,), (2,), (3,), (4,), (1, 2), (2, 1), (2, 2), (4, 1)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_every_mesh_equals_one_process_and_async_equals_sync(shape: tuple[int, ...]) -> None:
    """Against float64; both reshard modes, by owner and by block; asynchronous publishing changes
    no bit of anything.
    """
    start = build().state_dict()
    alone = build().double()
    formula = FormulaMuon(
        alone, weight_decay=0.1, coefficients=polar_express(5), dtype=torch.float64
    )
    expected = torch.tensor(train_alone(alone, formula, range(STEPS)))
    answer = alone.state_dict()

    def body(rank: int) -> None:
        mesh = make_mesh(*shape)

        def run(
            reshard: bool, replicate_async: bool, packing: Packing
        ) -> tuple[list[float], State, State]:
            model = prepare(mesh, reshard, packing=packing)
            optimizer = dmuon.Muon(
                model, weight_decay=0.1, ns_dtype=torch.float32, replicate_async=replicate_async
            )
            losses = train(model, optimizer, range(STEPS))
            state = dmuon.get_model_state_dict(model)
            return losses, state, dmuon.get_optimizer_state_dict(model, optimizer)

        def check(reshard: bool, packing: Packing) -> list[Any]:
            losses, state, optimizer_state = run(reshard, True, packing)
            torch.testing.assert_close(torch.tensor(losses), expected, rtol=2e-6, atol=0)
            assert_follows(state, answer, start)
            return [losses, state, optimizer_state]

        for reshard in (True, False):
            check(reshard, "block")
            by_owner = check(reshard, "owner")
            assert_identical(by_owner, list(run(reshard, replicate_async=False, packing="owner")))

    run_ranks(math.prod(shape), body)


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
