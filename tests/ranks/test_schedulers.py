"""Every scheduler of torch.optim drives Muon's groups as it drives those of a stock optimizer."""

import inspect
import json
import warnings

import pytest
import torch
from ranks_runner import run_ranks
from torch.optim import lr_scheduler
from wrapped import backward, make_mesh, prepare

import dmuon
from dmuon.checkpoint.plain_json import decode, encode

RATES = {"muon": 0.02, "adamw": 1e-3}
ARGUMENTS: dict[str, dict[str, object]] = {
    "ChainedScheduler": {},
    "ConstantLR": {},
    "CosineAnnealingLR": {"T_max": 4},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "CyclicLR": {"base_lr": [1e-3, 1e-4], "max_lr": [0.02, 1e-3], "cycle_momentum": False},
    "ExponentialLR": {"gamma": 0.5},
    "LambdaLR": {"lr_lambda": lambda step: 0.5**step},
    "LinearLR": {"start_factor": 0.25, "total_iters": 3},
    "MultiStepLR": {"milestones": [1, 3]},
    "MultiplicativeLR": {"lr_lambda": lambda step: 0.5},
    "OneCycleLR": {"max_lr": [0.02, 1e-3], "total_steps": 8, "cycle_momentum": False},
    "PolynomialLR": {"total_iters": 4, "power": 2.0},
    "ReduceLROnPlateau": {"patience": 0},
    "SequentialLR": {"milestones": [2]},
    "StepLR": {"step_size": 2},
}
SCHEDULERS = sorted(
    name
    for name, value in vars(lr_scheduler).items()
    if inspect.isclass(value)
    and issubclass(value, lr_scheduler.LRScheduler)
    and value is not lr_scheduler.LRScheduler
    and not name.startswith("_")
)


def make(name: str, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    of_others = [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    if name == "ChainedScheduler":
        return lr_scheduler.ChainedScheduler(of_others)
    if name == "SequentialLR":
        return lr_scheduler.SequentialLR(optimizer, of_others, **ARGUMENTS[name])
    for group in optimizer.param_groups:  # those above have begun to change it
        group["lr"] = group.pop("initial_lr")
    return getattr(lr_scheduler, name)(optimizer, **ARGUMENTS[name])


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "LRScheduler"])
def test_rates_are_those_of_a_stock_optimizer(name: str) -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(1))
        ours = dmuon.Muon(model, lr=RATES["muon"], adamw_lr=RATES["adamw"])
        groups = [
            {"params": [torch.nn.Parameter(torch.ones(1))], "lr": RATES[group["algorithm"]]}
            for group in ours.param_groups
        ]
        stock = torch.optim.SGD(groups)
        schedules = [make(name, ours), make(name, stock)]
        seen = set()
        for step in range(5):
            backward(model, step)
            ours.step()
            ours.zero_grad()
            stock.step()
            for schedule in schedules:
                schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates = [group["lr"] for group in ours.param_groups]
            assert rates == [group["lr"] for group in stock.param_groups]
            seen.add(rates[0])
        assert len(seen) > 1

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # "step() before optimizer.step()" and such
        run_ranks(1, body)


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "LRScheduler"])
def test_the_state_goes_on_after_a_stay_in_a_manifest(name: str) -> None:
    def start() -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
        groups = [{"params": [torch.ones(1)], "lr": rate} for rate in RATES.values()]
        stock = torch.optim.SGD(groups)
        return stock, make(name, stock)

    def step(stock: torch.optim.Optimizer, schedule: lr_scheduler.LRScheduler) -> list[float]:
        stock.step()
        schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        return [group["lr"] for group in stock.param_groups]

    stock, schedule = start()
    for _ in range(3):
        step(stock, schedule)
    again, resumed = start()
    again.load_state_dict(stock.state_dict())
    resumed.load_state_dict(decode(json.loads(json.dumps(encode(schedule.state_dict(), "extra")))))
    after = [step(stock, schedule) for _ in range(3)]
    assert [step(again, resumed) for _ in range(3)] == after
