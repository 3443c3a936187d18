"""Noticing gradients that were scaled by hand, where those of hidden matrices were not.

``torch.nn.utils.clip_grad_norm_`` leaves no other trace: what it does to a ``DTensor`` changes no
version. So a few values are looked at, which on an accelerator nobody waits for.
"""

import inspect
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dmuon.parameter import DedicatedParam

_NUM_PARAMS, _NUM_VALUES = 4, 16  # of a sample, and of each parameter in it
_ROUNDING = 2.0**-7  # a bfloat16 has 8 bits


class _Sample(NamedTuple):
    params: list[nn.Parameter]
    values: torch.Tensor


class ScalingWatch:
    """Warns, once, when gradients of symmetric parameters were multiplied after backward.

    When a backward is over, autograd and ``fully_shard`` are done with them. From then until the
    step all may not be multiplied by one factor, but by ``dmuon.clip_grad_norm_``. Two of them have
    to show it, by values that are not zero.

    Args:
        params: symmetric parameters; none: nothing is noticed.
        dedicated: those whose gradients live on owners.
    """

    def __init__(
        self, params: Iterable[nn.Parameter] = (), dedicated: Sequence[DedicatedParam] = ()
    ) -> None:
        held = [(p, _local(p)) for p in params if p.is_floating_point()]
        held = [(param, local) for param, local in held if local.numel()]
        self._params = [p for p, _ in sorted(held, key=lambda x: (x[1].ndim, x[1].numel()))]
        self._dedicated = dedicated
        self._places: dict[nn.Parameter, torch.Tensor] = {}
        self._sample: _Sample | None = None
        self._arriving: _Arriving | None = None

    def note(self) -> None:
        """Gradients are now as they should be. Local."""
        having = [param for param in self._params if _has_gradient(param)]
        last = len(having) - 1  # from the smallest, of which every value counts, to the largest
        params = [having[n * last // (_NUM_PARAMS - 1)] for n in range(_NUM_PARAMS) if last > 0]
        params = list(dict.fromkeys(params))
        self._sample = _Sample(params, self._values(params)) if params else None

    def look(self) -> None:
        """Look at them before anybody else changes them; ``tell`` says what was seen. Local."""
        sample = self._sample
        if sample is None or self._arriving is not None:
            return
        if all(map(_has_gradient, sample.params)):
            self._arriving = _Arriving(sample.values, self._values(sample.params))

    def tell(self) -> None:
        """Warn if all had been multiplied; on an accelerator, which nobody awaits, perhaps later.

        Local. It is the last thing that its callers do, since a warning may be an error.
        """
        if self._arriving is None or not self._arriving.is_here():
            return
        factor, self._arriving = self._arriving.factor(), None
        if factor is None or not any(param.param.requires_grad for param in self._dedicated):
            return
        self._params, self._sample = [], None
        warnings.warn(
            "between backward and step the gradients of the parameters that FSDP2 shards were "
            f"multiplied by {factor:.3g}, as torch.nn.utils.clip_grad_norm_ does; those of the "
            f"{len(self._dedicated)} hidden matrices live on their owners, where that does not "
            "arrive. Call dmuon.clip_grad_norm_(optimizer, max_norm) in its place",
            stacklevel=_level_of_caller(),
        )

    def _values(self, params: Sequence[nn.Parameter]) -> torch.Tensor:
        """Of the gradients, one row a parameter, with zeros where there are fewer."""
        rows = torch.zeros(len(params), _NUM_VALUES, device=_local(params[0]).device)
        for row, param in zip(rows, params, strict=True):
            assert param.grad is not None  # looked for
            local = _local(param.grad)
            if param not in self._places:
                self._places[param] = _places_in(local)
            values = torch.take(local, self._places[param])
            row[: len(values)] = values
        return rows


class _Arriving:
    """Values before and now, one row a parameter, on their way to host memory."""

    def __init__(self, before: torch.Tensor, now: torch.Tensor) -> None:
        both = torch.stack([before, now])
        self._both, self._event = both, None
        if both.device.type != "cpu":
            self._both = torch.empty_like(both, device="cpu", pin_memory=True)
            self._both.copy_(both, non_blocking=True)
            self._event = torch.get_device_module(both.device).Event()
            self._event.record()

    def is_here(self) -> bool:
        """Whether they can be read without waiting."""
        return self._event is None or bool(self._event.query())

    def factor(self) -> float | None:
        """What everything was multiplied by; None: not by one factor, by 0 or by 1.

        Rows of an embedding may have been set to zero, so one parameter alone does not tell.
        """
        if torch.equal(*self._both):
            return None
        before, now = self._both.double()
        factor = float((before * now).sum() / before.square().sum())
        error = (now - factor * before).abs()
        if not bool((error <= _ROUNDING * (factor * before).abs()).all()):  # nor NaN
            return None
        is_told_by_several = int(before.any(dim=1).sum()) > 1
        return factor if is_told_by_several and factor and abs(factor - 1) > _ROUNDING else None


def _level_of_caller() -> int:
    """As ``stacklevel`` of a warning from the calling function: the script's line, not torch's."""
    libraries = tuple(str(Path(file).parent) for file in (torch.__file__, __file__))
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(libraries):
        frame, level = frame.f_back, level + 1
    return level


def _places_in(local: torch.Tensor) -> torch.Tensor:
    """Spread over rows and columns, since rows of an embedding that were not looked up are zero."""
    number = min(_NUM_VALUES, local.numel())
    steps = torch.arange(number, device=local.device)
    return (steps * (local.numel() // number) + steps) % local.numel()


def _has_gradient(param: nn.Parameter) -> bool:
    return param.grad is not None and param.grad.layout == torch.strided


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
