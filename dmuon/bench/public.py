"""Adapters to distributed Muons that others publish and a user has installed; none is part of us.

They know the classic coefficients of Newton-Schulz alone, and run it in bfloat16.
"""

import importlib
import importlib.util

import torch
from torch import nn

from dmuon.bench.settings import MUON_FSDP2
from dmuon.bench.sharded_muon import hidden_and_rest

_PACKAGES = {MUON_FSDP2: ("muon_fsdp2", "muon-fsdp2")}  # what is imported, what pip installs


def check_installed(contenders: tuple[str, ...]) -> None:
    """Refuse contenders whose package is missing.

    Raises:
        ValueError: with the command that installs it.
    """
    for name in contenders:
        module, package = _PACKAGES.get(name, ("torch", "torch"))
        if importlib.util.find_spec(module) is None:
            raise ValueError(
                f"--contenders {name} needs a package that is not installed: pip install {package}"
            )


class Several(torch.optim.Optimizer):
    """More than one optimizer, as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers
        groups = [group for each in optimizers for group in each.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """A step of each."""
        for each in self._optimizers:
            each.step()


def muon_fsdp2(model: nn.Module, lr: float, adamw_lr: float) -> torch.optim.Optimizer:
    """The package ``muon-fsdp2``: a matrix is gathered on one rank and scattered, one by one."""
    hidden, rest = hidden_and_rest(model)
    muon = {"params": list(hidden.values()), "lr": lr, "rms_scale": True, "use_muon": True}
    adamw = {"params": rest, "lr": adamw_lr, "betas": (0.9, 0.999), "eps": 1e-8}
    groups = [muon, {**adamw, "weight_decay": 0.01, "use_muon": False}]
    optimizer: torch.optim.Optimizer = importlib.import_module("muon_fsdp2").Muon(groups)
    return optimizer


def torch_muon(model: nn.Module, lr: float, adamw_lr: float) -> torch.optim.Optimizer:
    """``torch.optim.Muon`` on the ``DTensor`` parameters of ``fully_shard``, as they come."""
    hidden, rest = hidden_and_rest(model)
    muon = torch.optim.Muon(
        hidden.values(), lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    return Several(muon, torch.optim.AdamW(rest, lr=adamw_lr))
