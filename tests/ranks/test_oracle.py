"""Training on many ranks equals training in one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks_runner import run_ranks
from tiny import FormulaMuon, build, is_proj, loss_of, share, tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon

STEPS = 6
CLASSIC = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024


def make_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("replicate", "shard") if len(shape) == 2 else None
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def prepare(mesh: DeviceMesh, reshard: bool = True, seed: int = 0) -> nn.Module:
    model = build(seed)
    dmuon.dedicate_params(model, mesh, predicate=is_proj, reshard_after_forward=reshard)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The global loss of each step."""
    losses = []
    for step in steps:
        loss = loss_of(model, share(tokens(step), dist.get_rank(), dist.get_world_size()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


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
        model = prepare(make_mesh(shape), reshard)
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
        model = prepare(make_mesh((2,)))
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
