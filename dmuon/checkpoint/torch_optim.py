"""The optimizer's state as ``torch.optim.Muon`` and ``torch.optim.AdamW`` keep it, and back.

``torch.optim.Muon`` keeps an average where ``dmuon.Muon`` keeps a sum (torch 2.13,
``torch/optim/_muon.py``, ``_single_tensor_muon``)::

    buf.lerp_(grad, 1 - momentum)           b <- momentum * b + (1 - momentum) * g
    update = grad.lerp(buf, momentum)       u  = (1 - momentum) * g + momentum * b     Nesterov

With ``dmuon``'s ``B <- momentum * B + g`` and ``U = g + momentum * B``, ``b = (1 - momentum) * B``
stays true from step to step, and so ``u = (1 - momentum) * U``. Newton-Schulz
divides by ``max(norm(u), eps)``, so both updates are equal when ``eps`` there is
``(1 - momentum) * eps`` here. AdamW is the stock one on both sides.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dmuon.checkpoint.assignment import section_of
from dmuon.checkpoint.description import checkpoint_folder
from dmuon.checkpoint.manifest import read_manifest
from dmuon.checkpoint.tensor_file import TensorReader
from dmuon.errors import CheckpointError, SetupError, StateDictError
from dmuon.names import original_name
from dmuon.newton_schulz import Triple, coefficient_schedule
from dmuon.optimizer_state import MOMENTS
from dmuon.splits import plain_splits, read_splits

Group = dict[str, Any]
State = dict[str, Any]

_MUON_SETTINGS = ("lr", "momentum", "nesterov", "weight_decay", "ns_steps", "adjust_lr_fn")
_ADAMW_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_UNKNOWN_TO_US = ("amsgrad", "maximize")


def read_optimizer_state(path: str | os.PathLike[str]) -> State:
    """The optimizer's state of a checkpoint, as ``get_optimizer_state_dict`` returns it. Local.

    Args:
        path: the folder of a checkpoint; its sizes are compared, its hashes are not.

    Raises:
        CheckpointError: there is none, or it holds weights alone.
        DamagedCheckpointError: it is not whole.
    """
    folder = checkpoint_folder(path)
    manifest = read_manifest(folder)
    if manifest.optimizer is None:
        raise CheckpointError(folder, "it holds no state of an optimizer, only weights")
    reader = TensorReader(folder, manifest)
    reader.verify(hashes=False)
    state: State = {"fsdp2": {}, "dedicated": {}}
    for file, tensors in manifest.tensors.items():
        for named in tensors if section_of(file) == "optim" else ():
            kind, _, name = named.partition("/")
            section = "fsdp2" if kind in MOMENTS else "dedicated"
            state[section].setdefault(name, {})[kind] = reader.read(named)
    for name, step in manifest.optimizer.steps.items():
        state["fsdp2"].setdefault(name, {})["step"] = torch.tensor(float(step))
    state["param_groups"] = [dict(group) for group in manifest.optimizer.param_groups]
    state["num_steps"] = manifest.optimizer.num_steps
    if manifest.optimizer.splits is not None:
        state["splits"] = plain_splits(manifest.optimizer.splits)
    return state


def optimizer_state_to_torch(
    state: Mapping[str, Any],
    model: nn.Module,
    muon: torch.optim.Muon,
    adamw: torch.optim.AdamW,
    *,
    ns_coefficients: Triple | None = None,
) -> tuple[State, State]:
    """Turn a state of ``dmuon.Muon`` into those of torch's two optimizers. Local, one process.

    Give the results to ``muon.load_state_dict`` and ``adamw.load_state_dict``: both then go on as
    ``dmuon.Muon`` would have, with its settings. What has no counterpart is refused, such as
    projections that are updated part by part, but for what torch does not do: it runs Newton-Schulz
    in bfloat16, and keeps weights and momentum in the dtype of the model, so build that in float32.

    Args:
        state: from ``read_optimizer_state`` or ``get_optimizer_state_dict``.
        model: the plain model, whose names are those of the state.
        muon: over the parameters that are dedicated in the state.
        adamw: over all others.
        ns_coefficients: to go on with. Needed when the state has one triple for each step, as is
            the default of ``dmuon.Muon``: ``torch.optim.Muon`` has one for all, and the updates
            are others from there on.

    Raises:
        StateDictError: listing the parameters and settings that do not fit.
    """
    problems = _beyond_torch(state)
    settings = _settings_by_name(state, problems)
    names = _names_of(model)
    muon_state = _to_torch(muon, names, settings, problems, _MuonConverter(state, ns_coefficients))
    adamw_state = _to_torch(adamw, names, settings, problems, _AdamWConverter(state))
    covered = {name for each in (muon, adamw) for name in _all_names(each, names)}
    held = (state.get("fsdp2") or {}).keys() | (state.get("dedicated") or {}).keys()
    problems += [f"{name}: in neither of the two optimizers" for name in sorted(held - covered)]
    if problems:
        raise StateDictError("the optimizer state", problems)
    return muon_state, adamw_state


def _beyond_torch(state: Mapping[str, Any]) -> list[str]:
    """What ``torch.optim.Muon`` would update otherwise, or not take."""
    problems: list[str] = []
    try:
        splits = read_splits(state.get("splits", {}))  # the first checkpoints do not tell
    except ValueError as error:
        return [str(error)]
    for name, held in (state.get("dedicated") or {}).items():
        momentum = held.get("momentum_buffer")
        if name in splits:
            problems.append(
                f"{name}: {splits[name]}, each part updated on its own, which torch.optim.Muon "
                "does not do; make each part a parameter of its own, with its part of the "
                "momentum, or, to have it updated whole from here on, delete it from "
                "state['splits']"
            )
        elif momentum is not None and momentum.ndim != 2:
            problems.append(
                f"{name}: several matrices in one parameter of shape {list(momentum.shape)}, which "
                "torch.optim.Muon does not take; make each matrix a parameter of its own, with "
                "its part of the momentum"
            )
    return problems


def optimizer_state_from_torch(
    model: nn.Module, muon: torch.optim.Muon, adamw: torch.optim.AdamW
) -> State:
    """Turn the states of torch's two optimizers into one of ``dmuon.Muon``. Local, one process.

    Give the result to ``dmuon.set_optimizer_state_dict`` on all ranks, or to it on the first and an
    empty dict on the others. It holds no settings: build ``dmuon.Muon`` with those that
    ``muon_settings_from_torch`` returns. The momentum must be the same.

    Args:
        model: the plain model that they train.
        muon: its ``torch.optim.Muon``.
        adamw: its ``torch.optim.AdamW``.

    Raises:
        StateDictError: an optimizer does what ``dmuon.Muon`` does not, or has other parameters.
    """
    names = _names_of(model)
    problems: list[str] = []
    dedicated: State = {}
    symmetric: State = {}
    for group in muon.param_groups:
        for _, name, param in _named(group, names, problems):
            if "momentum_buffer" in muon.state.get(param, {}):
                average = muon.state[param]["momentum_buffer"].detach()
                total = average.to("cpu", torch.float64) / (1 - group["momentum"])
                dedicated[name] = {"momentum_buffer": total.float()}
    for group in adamw.param_groups:
        used = [key for key in _UNKNOWN_TO_US if group.get(key)]
        problems += [f"{key}=True: dmuon.Muon knows AdamW without it" for key in used]
        for _, name, param in _named(group, names, problems):
            if held := adamw.state.get(param):
                symmetric[name] = {key: _copy(held[key]) for key in (*MOMENTS, "step")}
    if problems:
        raise StateDictError("the state of torch's optimizers", problems)
    steps = [int(each["step"]) for each in symmetric.values()]
    return {"fsdp2": symmetric, "dedicated": dedicated, "num_steps": max(steps, default=0)}


def muon_settings_from_torch(muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> Group:
    """The arguments for ``dmuon.Muon`` with which it does what these two do. Local.

    Raises:
        SetupError: one of them has several groups; give ``dmuon.Muon(param_groups=...)`` theirs.
    """
    if len(muon.param_groups) != 1 or len(adamw.param_groups) != 1:
        raise SetupError(
            "muon_settings_from_torch reads optimizers of one group each; for several, give "
            "dmuon.Muon(model, param_groups=[...]) their settings"
        )
    ours, theirs = muon.param_groups[0], adamw.param_groups[0]
    settings = {key: ours[key] for key in (*_MUON_SETTINGS, "ns_coefficients")}
    settings["eps"] = ours["eps"] / (1 - ours["momentum"])
    settings["adjust_lr_fn"] = ours["adjust_lr_fn"] or "original"  # what None means there
    return settings | {f"adamw_{key}": theirs[key] for key in _ADAMW_SETTINGS}


@dataclass(frozen=True)
class _MuonConverter:
    state: Mapping[str, Any]
    ns_coefficients: Triple | None
    algorithm: str = "muon"

    def settings(self, group: Group) -> Group:
        """Those of a group there.

        Raises:
            ValueError: it has none of that kind.
        """
        settings = {key: group[key] for key in _MUON_SETTINGS}
        if settings["adjust_lr_fn"] is None:
            raise ValueError("adjust_lr_fn=None: torch.optim.Muon always adjusts the rate")
        settings["eps"] = group["eps"] * (1 - group["momentum"])
        settings["ns_coefficients"] = self._coefficients(group)
        return settings

    def values(self, name: str, group: Group) -> State:
        """Those of a parameter there; empty when it was never updated."""
        held = (self.state.get("dedicated") or {}).get(name, {})
        if "momentum_buffer" not in held:
            return {}
        total = held["momentum_buffer"].detach().to("cpu", torch.float64)
        return {"momentum_buffer": (total * (1 - group["momentum"])).float()}

    def _coefficients(self, group: Group) -> Triple:
        chosen = self.ns_coefficients or group["ns_coefficients"]
        schedule = coefficient_schedule(chosen, group["ns_steps"])
        if len(set(schedule)) > 1:
            raise ValueError(
                "ns_coefficients: one triple for each step, but torch.optim.Muon has one for all; "
                "say with ns_coefficients=dmuon.CLASSIC_COEFFICIENTS, or others, how to go on"
            )
        return schedule[0]


@dataclass(frozen=True)
class _AdamWConverter:
    state: Mapping[str, Any]
    algorithm: str = "adamw"

    def settings(self, group: Group) -> Group:
        """Those of a group there."""
        settings = {key: group[key] for key in _ADAMW_SETTINGS}
        return settings | dict.fromkeys(_UNKNOWN_TO_US, False)

    def values(self, name: str, _group: Group) -> State:
        """Those of a parameter there; empty when it was never updated."""
        held = (self.state.get("fsdp2") or {}).get(name, {})
        return {key: _copy(held[key]) for key in (*MOMENTS, "step") if key in held}


def _to_torch(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
    settings: Mapping[str, Group],
    problems: list[str],
    converter: _MuonConverter | _AdamWConverter,
) -> State:
    """The state dict of one optimizer. What does not fit is added to ``problems``."""
    plain = optimizer.state_dict()  # for the numbers of parameters, and the form of groups
    values: dict[int, State] = {}
    groups: list[Group] = []
    for live, numbered in zip(optimizer.param_groups, plain["param_groups"], strict=True):
        ours: list[Group] = []
        for index, name, _ in _named(live, names, problems):
            group = settings.get(name)
            if group is None or group["algorithm"] != converter.algorithm:
                by = "nothing" if group is None else group["algorithm"]
                problems.append(
                    f"{name}: is trained by {by} in the state, not {converter.algorithm}"
                )
                continue
            ours.append(group)
            if held := converter.values(name, group):
                values[numbered["params"][index]] = held
        groups.append(numbered | _common(ours, converter.settings, problems))
    return {"state": values, "param_groups": groups}


def _common(groups: list[Group], convert: Callable[[Group], Group], problems: list[str]) -> Group:
    """The settings that all parameters of one group of torch's have."""
    found: list[Group] = []
    for group in groups:
        try:
            settings = convert(group)
        except ValueError as error:
            problems.append(str(error))
            return {}
        if settings not in found:
            found.append(settings)
    if len(found) > 1:
        keys = [key for key in found[0] if found[0][key] != found[1][key]]
        problems.append(
            f"{', '.join(keys)}: differ in the state among parameters that are one group here"
        )
    return found[0] if found else {}


def _settings_by_name(state: Mapping[str, Any], problems: list[str]) -> dict[str, Group]:
    groups = state.get("param_groups")
    if not isinstance(groups, list):
        problems.append("param_groups: missing, but the momentum means nothing without them")
        return {}
    return {name: group for group in groups for name in group["names"]}


def _names_of(model: nn.Module) -> dict[Tensor, str]:
    return {param: original_name(name) for name, param in model.named_parameters()}


def _named(
    group: Group, names: Mapping[Tensor, str], problems: list[str]
) -> Iterator[tuple[int, str, Tensor]]:
    for index, param in enumerate(group["params"]):
        if param in names:
            yield index, names[param], param
        else:
            problems.append(f"parameter {index} of a group: not one of this model")


def _all_names(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> set[str]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {names[param] for param in params if param in names}


def _copy(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().to("cpu", copy=True)
