"""Whether all Muons compute the same: their weights after the same steps, side by side."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

import dmuon
from dmuon.bench import decoder
from dmuon.bench.contenders import Contender, newton_schulz_dtype
from dmuon.bench.settings import PUBLIC, Settings
from dmuon.bench.sharded_muon import hidden_and_rest

# Of the change of a matrix in a few steps: float32 differs by the order of sums, bfloat16 rounds to
# 3 digits in each step of Newton-Schulz.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.3}


def tolerance(name: str, settings: Settings, device_type: str) -> float:
    """How far a contender's changes may be from DMuon's, relative to them."""
    if name in PUBLIC or settings.precision != "float32":
        return _TOLERANCES[torch.bfloat16]
    return _TOLERANCES[newton_schulz_dtype(settings, torch.device(device_type))]


@torch.no_grad()
def differences(
    reference: Contender, others: Iterable[Contender], settings: Settings
) -> dict[str, float]:
    """Of each, the largest difference of a hidden matrix from that of ``reference``.

    Relative to the change since the start, in Frobenius norms. Collective over all ranks.

    Returns:
        By name on rank 0, nothing on others.
    """
    theirs = dmuon.get_model_state_dict(reference.model, cpu_offload=True, rank0_only=True)
    start = decoder.build(settings).state_dict() if dist.get_rank() == 0 else {}
    found: dict[str, float] = {}
    for other in others:
        worst = 0.0
        for name, param in hidden_and_rest(other.model)[0].items():
            whole = param.full_tensor().cpu()
            if start:
                change = (theirs[name] - start[name]).norm()
                worst = max(worst, float((whole - theirs[name]).norm() / change))
        if start:
            found[other.name] = worst
    return found
