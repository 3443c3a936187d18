"""Optimizer state dicts: whole tensors by name, plain types, free of the mesh."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dmuon import dedication as dedications
from dmuon.agreement import Courier, gather_objects, raise_together
from dmuon.call_order import Call
from dmuon.dedication import Dedication
from dmuon.errors import SetupError
from dmuon.flags import check_flags
from dmuon.groups import pair_groups
from dmuon.optimizer import Muon
from dmuon.parcel import MASTER_DTYPE, Parcel
from dmuon.splits import (
    other_splits,
    plain_splits,
    read_splits,
    splits_of,
    warn_of_other_splits,
)

_SYMMETRIC_SECTIONS = ("fsdp2", "fsdp", "dedicated_adamw")  # the last two from other writers
_SECTIONS = (*_SYMMETRIC_SECTIONS, "dedicated")
MOMENTS = ("exp_avg", "exp_avg_sq")
_PARTS = ("momentum_buffer", "master_weight")


class _Section:
    """Stands for a section among flattened values, also for an empty one."""


@torch.no_grad()
def get_optimizer_state_dict(
    model: nn.Module, optimizer: Muon, *, cpu_offload: bool = False, rank0_only: bool = False
) -> dict[str, Any]:
    """The optimizer's whole state by original names. Collective over the mesh.

    Args:
        model: as given to ``dedicate_params``.
        optimizer: the ``dmuon.Muon`` of this model.
        cpu_offload: put the values into host memory.
        rank0_only: the first rank of the mesh gets the dict, all others an empty one.

    Returns:
        ``{"fsdp2": {name: {"exp_avg", "exp_avg_sq", "step"}}, "dedicated": {name:
        {"momentum_buffer"}}, "param_groups": [...], "num_steps": int, "splits": {name: {"sizes",
        "dim"}}}``; matrices that are not
        float32 in the model also have their float32 ``"master_weight"``. Plain types only, so
        ``torch.load(..., weights_only=True)`` reads it.
    """
    check_flags(cpu_offload=cpu_offload, rank0_only=rank0_only)
    dedication = dedication_of(model, optimizer)
    dedication.settle_for(Call.GET_OPTIMIZER_STATE_DICT)
    keep = not rank0_only or dedication.owner_map.rank == 0
    device = torch.device("cpu") if cpu_offload else dedication.device
    symmetric: dict[str, Any] = {}
    for name, param in symmetric_params(optimizer).items():
        state = optimizer.state.get(param)
        if state:
            values = {key: _full(state[key], device) for key in (*MOMENTS, "step")}
            if keep:
                symmetric[name] = values
    dedicated = _get_dedicated(dedication, optimizer, keep, device)
    if not keep:
        return {}
    groups = [plain_group(group) for group in optimizer.param_groups]
    return {
        "fsdp2": symmetric,
        "dedicated": dedicated,
        "param_groups": groups,
        "num_steps": optimizer.num_steps,
        "splits": plain_splits(splits_of(dedication.params)),
    }


@torch.no_grad()
def set_optimizer_state_dict(
    model: nn.Module, optimizer: Muon, state_dict: Mapping[str, Any]
) -> None:
    """Load a whole optimizer state, written on any mesh. Collective over the mesh.

    Every rank passes the full dict, or the first rank alone and all others an empty one.
    Settings of the parameter groups (rates, decay, ...) are restored too. Parameters that were
    split otherwise are named in a warning.

    Raises:
        StateDictError: the same on every rank, before anything changed.
    """
    dedication = dedication_of(model, optimizer)
    dedication.settle_for(Call.SET_OPTIMIZER_STATE_DICT)
    courier = Courier(dedication, _flatten(state_dict))
    _check(dedication, optimizer, courier)
    for name, param in symmetric_params(optimizer).items():
        _set_symmetric(optimizer, name, param, courier)
    for block in dedication.engine.blocks:
        for parcel in block.parcels:
            _set_parcel(optimizer, parcel, courier)
    _set_settings(optimizer, courier)
    dedication.engine.publish(wait=True)


def dedication_of(model: nn.Module, optimizer: Muon) -> Dedication:
    """The dedication of ``model``, whose optimizer this is.

    Raises:
        SetupError: for the optimizer of another model, or of another kind.
    """
    dedication = dedications.of(model)
    if not isinstance(optimizer, Muon) or optimizer.dedication is not dedication:
        raise SetupError(
            f"this {type(optimizer).__name__} is not the dmuon.Muon that was built for this model; "
            "give the model and its own dmuon.Muon(model, ...)"
        )
    return dedication


def symmetric_params(optimizer: Muon) -> dict[str, nn.Parameter]:
    """What AdamW updates, by name. Local."""
    return {
        name: param
        for group in optimizer.param_groups
        if group["algorithm"] == "adamw"
        for name, param in zip(group["names"], group["params"], strict=True)
    }


def _get_dedicated(
    dedication: Dedication, optimizer: Muon, keep: bool, device: torch.device
) -> dict[str, dict[str, torch.Tensor]]:
    started = [p.name for p in dedication.params if optimizer.state.get(p.param)]
    have_momentum = {n for names in gather_objects(dedication, started) for n in names}
    dedicated: dict[str, dict[str, torch.Tensor]] = {}
    for block in dedication.engine.blocks:
        for parcel in block.parcels:
            momentum = parcel.gather_full(_flat_momentum(optimizer, parcel))
            parts = {"momentum_buffer": momentum}
            if any(param.dtype != MASTER_DTYPE for param in parcel.params):
                parts["master_weight"] = parcel.gather_full(parcel.master)
            for param in parcel.params if keep else ():
                entry = {k: parcel.view(flat, param) for k, flat in parts.items()}
                if param.name not in have_momentum:
                    del entry["momentum_buffer"]
                if entry:
                    dedicated[param.name] = {k: _full(v, device) for k, v in entry.items()}
    return dedicated


def _flat_momentum(optimizer: Muon, parcel: Parcel) -> torch.Tensor | None:
    if parcel.master is None:
        return None
    flat = torch.zeros_like(parcel.master)
    for param, view in zip(parcel.params, parcel.views(flat), strict=True):
        state = optimizer.state.get(param.param)
        if state:
            view.copy_(state["momentum_buffer"])
    return flat


def _full(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().to(device=device, copy=True).contiguous()


def plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group as plain types."""
    plain = {key: value for key, value in group.items() if key != "params"}
    for key, value in plain.items():
        if isinstance(value, torch.dtype):
            plain[key] = str(value).removeprefix("torch.")
        elif isinstance(value, torch.Tensor):
            plain[key] = value.item()
    return plain


def live_group(saved: Mapping[str, Any]) -> dict[str, Any]:
    """`plain_group` undone, without the names."""
    live = {key: value for key, value in saved.items() if key not in ("params", "names")}
    if isinstance(live.get("ns_dtype"), str):
        live["ns_dtype"] = getattr(torch, live["ns_dtype"])
    return live


def _flatten(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Local; what is malformed stays as it is, for `_check` to tell all ranks."""
    if not isinstance(state_dict, Mapping):
        return state_dict
    flat: dict[str, Any] = {}
    for section, content in state_dict.items():
        if section in _SECTIONS and _is_nested(content):
            flat[section] = _Section()
            kind = "dedicated" if section == "dedicated" else "fsdp2"
            for name, entries in content.items():
                for key, value in entries.items():
                    flat[f"{kind}/{name}/{key}"] = value
        else:
            flat[section] = content
    return flat


def _is_nested(content: object) -> bool:
    if not isinstance(content, Mapping):
        return False
    return all(isinstance(entries, Mapping) for entries in content.values())


def _check(dedication: Dedication, optimizer: Muon, courier: Courier) -> None:
    shapes = {f"fsdp2/{n}": p.shape for n, p in symmetric_params(optimizer).items()}
    shapes |= {f"dedicated/{p.name}": p.shape for p in dedication.params}
    problems = list(courier.problems)
    found = [section for section in _SECTIONS if section in courier.described]
    if not found:
        problems.append(_not_ours(courier))
    for section in found:
        if courier.described[section][0] != f"a {_Section.__name__}":
            problems.append(f"{section}: must be {{name: {{key: tensor}}}}")
    for path, (kind, shape, _) in courier.described.items():
        if "/" in path:
            problems += _check_value(path, kind, shape, shapes)
    for name in symmetric_params(optimizer):
        keys = [key for key in (*MOMENTS, "step") if f"fsdp2/{name}/{key}" in courier.described]
        if 0 < len(keys) < 3:
            problems.append(f"fsdp2/{name}: has only {keys}, needs exp_avg, exp_avg_sq and step")
    problems += _check_num_steps(courier)
    problems += _check_groups(optimizer, courier)
    problems += _check_splits(courier)
    raise_together(dedication, "the optimizer state dict", problems)


def _check_value(
    path: str, kind: str, shape: torch.Size | None, shapes: Mapping[str, torch.Size]
) -> list[str]:
    owner, _, key = path.rpartition("/")
    problems: list[str] = []
    if owner not in shapes:
        problems.append(f"{path}: {_why_unknown(owner, shapes)}")
    elif key not in (_PARTS if owner.startswith("dedicated/") else (*MOMENTS, "step")):
        problems.append(f"{path}: no such state in this optimizer")
    elif key == "step":
        if not _is_number(kind, shape):
            problems.append(f"{path}: is {kind}, needs a number")
    elif kind != "tensor":
        problems.append(f"{path}: is {kind}, needs a whole dense tensor")
    elif shape != shapes[owner]:
        problems.append(f"{path}: has shape {list(shape or ())}, needs {list(shapes[owner])}")
    return problems


def _not_ours(courier: Courier) -> str:
    if "state" not in courier.described:
        return "no section 'dedicated' or 'fsdp2': this is no optimizer state dict"
    return (
        "no section 'dedicated' or 'fsdp2': this is one of torch's, with 'state'; its moments, by "
        "name and without those of hidden matrices, are the section 'fsdp2' (dmuon/MOVING.md, "
        '"A checkpoint that you already have")'
    )


def _why_unknown(owner: str, shapes: Mapping[str, torch.Size]) -> str:
    _, _, name = owner.partition("/")
    if name.isdigit():
        return (
            "a number is no name; torch.distributed.checkpoint.state_dict.get_state_dict gives the "
            "state by names, optimizer.state_dict() does not"
        )
    if f"dedicated/{name}" in shapes:
        return "is a hidden matrix, which has no use for AdamW's moments; leave them out"
    if f"fsdp2/{name}" in shapes:
        return "is no hidden matrix here; its moments belong in the section 'fsdp2'"
    return "no such parameter in this optimizer"


def _is_number(kind: str, shape: torch.Size | None) -> bool:
    return kind in ("a int", "a float") or (kind == "tensor" and shape == torch.Size())


def _check_num_steps(courier: Courier) -> list[str]:
    kind, shape, _ = courier.described.get("num_steps", ("a int", None, None))
    return [] if _is_number(kind, shape) else [f"num_steps: is {kind}, needs a number"]


def _check_groups(optimizer: Muon, courier: Courier) -> list[str]:
    if "param_groups" not in courier.described:
        return []
    groups = courier.fetch("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return ["param_groups: must be a list of dictionaries"]
    if pair_groups(optimizer.param_groups, groups, optimizer.dedication.model) is None:
        return ["param_groups: other parameters or another order than in this optimizer"]
    return []


def _check_splits(courier: Courier) -> list[str]:
    if "splits" not in courier.described:
        return []
    try:
        read_splits(courier.fetch("splits"))
    except ValueError as error:
        return [str(error)]
    return []


def _set_settings(optimizer: Muon, courier: Courier) -> None:
    if "param_groups" in courier.described:
        saved_groups = courier.fetch("param_groups")
        pairs = pair_groups(optimizer.param_groups, saved_groups, optimizer.dedication.model)
        assert pairs is not None  # checked
        for group, saved in pairs:
            group.update(live_group(saved))
    if "num_steps" in courier.described:
        optimizer.num_steps = int(courier.fetch("num_steps"))
    if "splits" in courier.described:
        saved_splits = read_splits(courier.fetch("splits"))
        if optimizer.dedication.owner_map.rank == 0:
            different = other_splits(saved_splits, optimizer.dedication.params)
            warn_of_other_splits("the optimizer state dict", different)


def _set_symmetric(optimizer: Muon, name: str, param: nn.Parameter, courier: Courier) -> None:
    if f"fsdp2/{name}/step" not in courier.described:
        optimizer.state.pop(param, None)
        return
    state: dict[str, torch.Tensor] = {}
    step = courier.fetch(f"fsdp2/{name}/step")
    state["step"] = torch.as_tensor(step, dtype=torch.float32).detach().clone().cpu()
    for key in MOMENTS:
        value = courier.fetch(f"fsdp2/{name}/{key}").detach().to(device=param.device)
        value = value.to(param.dtype)
        if isinstance(param, DTensor):
            mesh, placements = param.device_mesh, param.placements
            state[key] = distribute_tensor(value, mesh, placements, src_data_rank=None).clone()
        else:
            state[key] = value.clone()
    optimizer.state[param] = state


def _set_parcel(optimizer: Muon, parcel: Parcel, courier: Courier) -> None:
    for param in parcel.params:
        values = {
            key: courier.fetch(f"dedicated/{param.name}/{key}")
            for key in _PARTS
            if f"dedicated/{param.name}/{key}" in courier.described
        }
        if parcel.master is None:
            continue
        if "master_weight" in values:
            parcel.view(parcel.master, param).copy_(values["master_weight"])
        optimizer.state.pop(param.param, None)
        if "momentum_buffer" in values:
            momentum = values["momentum_buffer"].detach()
            momentum = momentum.to(device=parcel.device, dtype=MASTER_DTYPE, copy=True)
            optimizer.state[param.param] = {"momentum_buffer": momentum.contiguous()}
