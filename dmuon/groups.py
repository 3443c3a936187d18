"""Parameter groups of ``dmuon.Muon``: checked settings, equal on every rank."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import nn

from dmuon.argument_names import explain
from dmuon.errors import SetupError
from dmuon.muon_update import ADJUST_LR_FNS
from dmuon.names import original_name
from dmuon.newton_schulz import coefficient_schedule

Group = dict[str, Any]

MUON_KEYS = (
    *("lr", "momentum", "nesterov", "weight_decay", "ns_steps", "ns_coefficients"),
    *("ns_dtype", "adjust_lr_fn", "eps"),
)
ADAMW_KEYS = ("adamw_lr", "adamw_betas", "adamw_eps", "adamw_weight_decay")
_KEYS = ("params", *MUON_KEYS, *ADAMW_KEYS)
_ADAMW_NUMBERS = ("betas", "eps")
_AT_LEAST_0 = ("lr", "adamw_lr", "weight_decay", "adamw_weight_decay", "adamw_eps")
_NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    **dict.fromkeys(_AT_LEAST_0, ("of at least 0", lambda value: 0 <= value < math.inf)),
    "momentum": ("in [0, 1)", lambda value: 0 <= value < 1),
    "eps": ("above 0", lambda value: value > 0),
}
"""Settings that are one number: the rule in words, and whether it holds."""
_ADAMW_SWITCHES = {
    "amsgrad": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "foreach": None,
    "fused": None,
    "decoupled_weight_decay": True,
}


@dataclass(frozen=True)
class Named:
    """The parameters of a model by name, dedicated and symmetric; frozen ones may thaw later."""

    dedicated: dict[str, nn.Parameter]
    symmetric: dict[str, nn.Parameter]

    @property
    def all(self) -> dict[str, nn.Parameter]:
        """Both kinds."""
        return {**self.dedicated, **self.symmetric}


def make_groups(
    named: Named, defaults: Mapping[str, Any], overrides: Sequence[Mapping[str, Any]] | None
) -> list[Group]:
    """Groups in a fixed order: the user's, then what is left; Muon before AdamW in each.

    Raises:
        SetupError: for an unknown setting, a setting out of range or without effect, or a
            parameter that is unknown or in two groups.
    """
    if not isinstance(overrides, Sequence | None) or isinstance(overrides, str):
        kind = type(overrides).__name__
        raise SetupError(f"param_groups must be a list of dictionaries, got {kind}")
    left = dict(named.all)
    groups: list[Group] = []
    for index, override in enumerate(overrides or ()):
        where = f"param_groups[{index}]"
        if not isinstance(override, Mapping):
            raise SetupError(f"{where} must be a dictionary, got {type(override).__name__}")
        if unknown := [key for key in override if key not in _KEYS]:
            raise SetupError(explain(where, unknown, _KEYS))
        if "params" not in override:
            raise SetupError(f"{where} has no 'params', a list of parameters or of their names")
        names = _names_of(override["params"], named, left, where)
        _check_reach(names, named, override, where)
        settings = {**defaults, **{key: override[key] for key in override if key != "params"}}
        groups += _split(names, named, settings, where)
        for name in names:
            del left[name]
    return groups + _split(list(left), named, defaults, "Muon(...)")


def numbers_of(group: Mapping[str, Any]) -> list[float]:
    """The settings of a group that schedules change, but for tensors, which may be on a device."""
    values = (group.get(key) for key in ("lr", "momentum", "weight_decay", *_ADAMW_NUMBERS))
    flat = [n for v in values for n in (v if isinstance(v, tuple | list) else (v,))]
    return [float(number) for number in flat if isinstance(number, int | float)]


def pair_groups(
    groups: Sequence[Group], saved: Sequence[Mapping[str, Any]], model: nn.Module
) -> list[tuple[Group, Mapping[str, Any]]] | None:
    """Each group with the saved one of the same parameters; None where they do not fit.

    Frozen parameters are passed over, and so are groups of those alone that the other side lacks:
    one that nobody shards is in a group on one rank and not on several.
    """
    named = model.named_parameters()
    frozen = {original_name(name) for name, param in named if not param.requires_grad}

    def trained(group: Mapping[str, Any]) -> list[str]:
        return [name for name in group.get("names", ()) if name not in frozen]

    ours = [group for group in groups if trained(group)]
    theirs = [group for group in saved if trained(group)]
    if [trained(group) for group in ours] != [trained(group) for group in theirs]:
        return None
    pairs = list(zip(ours, theirs, strict=True))
    at_rest = {tuple(group.get("names", ())): group for group in saved if not trained(group)}
    names_of = [(group, tuple(group["names"])) for group in groups if not trained(group)]
    return pairs + [(group, at_rest[names]) for group, names in names_of if names in at_rest]


def _names_of(
    params: Iterable[Any],
    named: Named,
    left: Mapping[str, Any],
    where: str,
) -> list[str]:
    if isinstance(params, torch.Tensor):
        params = [params]
    if isinstance(params, set | frozenset | str) or not isinstance(params, Iterable):
        raise SetupError(f"{where}: params must be a list, whose order is the same on all ranks")
    by_param = {param: name for name, param in named.all.items()}
    names = []
    for param in params:
        name = original_name(param) if isinstance(param, str) else by_param.get(param)
        if name is None or name not in named.all:
            shown = tuple(param.shape) if isinstance(param, torch.Tensor) else param
            raise SetupError(
                f"{where} has a parameter that is not one of this model ({shown}); take them from "
                "model.named_parameters() after fully_shard"
            )
        if name not in left or name in names:
            raise SetupError(f"{name} is in two parameter groups, the second is {where}")
        names.append(name)
    return names


def _check_reach(
    names: Sequence[str], named: Named, override: Mapping[str, Any], where: str
) -> None:
    """Refuse what would be ignored: a setting of the other kind of parameter, and that alone.

    A model of which one kind is absent, as in a baseline of AdamW alone, may be given both.
    """
    if not (names and named.dedicated and named.symmetric):
        return
    if not any(name in named.dedicated for name in names):
        vain = [key for key in MUON_KEYS if key in override and f"adamw_{key}" not in override]
        kind, others = "hidden matrices", ", ".join(ADAMW_KEYS)
    elif not any(name in named.symmetric for name in names):
        vain = [
            key
            for key in ADAMW_KEYS
            if key in override and key.removeprefix("adamw_") not in override
        ]
        kind, others = "what AdamW updates", ", ".join(MUON_KEYS)
    else:
        return
    if vain:
        raise SetupError(
            f"{where} sets {', '.join(vain)}, which is for {kind}, and has none of them "
            f"({names[0]}, ...); its parameters take {others}"
        )


def _split(
    names: Sequence[str], named: Named, settings: Mapping[str, Any], where: str
) -> list[Group]:
    _check(settings, where)
    muon = [name for name in names if name in named.dedicated]
    adamw = [name for name in names if name in named.symmetric]
    groups: list[Group] = []
    if muon:
        group = {key: settings[key] for key in MUON_KEYS}
        params = [named.dedicated[name] for name in muon]
        groups.append({"params": params, "names": muon, "algorithm": "muon", **group})
    if adamw:
        group = {key.removeprefix("adamw_"): settings[key] for key in ADAMW_KEYS}
        params = [named.symmetric[name] for name in adamw]
        kind = {"names": adamw, "algorithm": "adamw"}
        groups.append({"params": params, **kind, **group, **_ADAMW_SWITCHES})
    return groups


def _check(settings: Mapping[str, Any], where: str) -> None:
    for key, (rule, holds) in _NUMBERS.items():
        if not holds(_number(settings[key])):
            raise SetupError(f"{where}: {key} must be a number {rule}, got {settings[key]!r}")
    betas = settings["adamw_betas"]
    are_two = isinstance(betas, Sequence) and len(betas) == 2
    if not are_two or not all(0 <= _number(beta) < 1 for beta in betas):
        raise SetupError(f"{where}: adamw_betas must be two numbers in [0, 1), got {betas!r}")
    _check_choices(settings, where)


def _number(value: object) -> float:
    """A setting as a number; NaN, which no rule takes, for what is none."""
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    return float(value) if is_scalar or isinstance(value, Real) else math.nan  # type: ignore[arg-type]


def _check_choices(settings: Mapping[str, Any], where: str) -> None:
    if not isinstance(settings["nesterov"], bool):
        raise SetupError(f"{where}: nesterov must be True or False, got {settings['nesterov']!r}")
    if settings["adjust_lr_fn"] not in ADJUST_LR_FNS:
        raise SetupError(
            f"{where}: adjust_lr_fn must be one of {ADJUST_LR_FNS}, "
            f"got {settings['adjust_lr_fn']!r}"
        )
    if settings["ns_dtype"] not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise SetupError(
            f"{where}: ns_dtype must be None or a torch dtype of 16 or 32 bits, "
            f"got {settings['ns_dtype']!r}"
        )
    try:
        coefficient_schedule(settings["ns_coefficients"], settings["ns_steps"])
    except (TypeError, ValueError) as error:
        raise SetupError(f"{where}: {error}") from error
