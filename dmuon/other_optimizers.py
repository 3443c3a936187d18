"""Other optimizers that were given dedicated parameters are told so when they step."""

from functools import cache
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dmuon.dedication import Dedication
from dmuon.errors import SetupError
from dmuon.optimizer import Muon

_watched: WeakSet[Dedication] = WeakSet()


def watch(dedication: Dedication) -> None:
    """From now on refuse steps of other optimizers over the parameters of ``dedication``.

    Their gradients are kept by DMuon, so such an optimizer would pass over them in silence and
    train the rest of the model alone.
    """
    _watched.add(dedication)
    _hook_steps()


@cache
def _hook_steps() -> None:
    register_optimizer_step_pre_hook(_refuse_dedicated)


def _refuse_dedicated(optimizer: Optimizer, args: object, kwargs: Any) -> None:
    if isinstance(optimizer, Muon):
        return
    given = {param for group in optimizer.param_groups for param in group["params"]}
    for dedication in _watched:
        ours = [param.name for param in dedication.params if param.param in given]
        if ours:
            more = f" and {len(ours) - 1} more" if len(ours) > 1 else ""
            raise SetupError(
                f"this {type(optimizer).__name__} was given {ours[0]}{more}, whose gradients "
                "dedicate_params keeps for the owners, so it would never update them; use "
                "dmuon.Muon(model), which runs AdamW on all other parameters"
            )
