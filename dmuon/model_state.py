"""Model state dicts: flat, whole tensors, names of the original model."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dmuon import dedication as dedications
from dmuon.agreement import Courier, gather_objects, raise_together
from dmuon.call_order import Call
from dmuon.dedication import Dedication
from dmuon.errors import OwnershipError
from dmuon.flags import check_flags
from dmuon.names import is_extra_state, original_name
from dmuon.parcel import Parcel


class IncompatibleKeys(NamedTuple):
    """What ``strict=False`` passed over."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@torch.no_grad()
def get_model_state_dict(
    model: nn.Module, *, cpu_offload: bool = False, rank0_only: bool = False
) -> dict[str, Any]:
    """The whole model as plain tensors under its original names. Collective over the mesh.

    Weights still being published are waited for. Values are copies, never views of live weights;
    tied weights appear under each of their names, as in ``model.state_dict()``.

    Args:
        model: as given to ``dedicate_params``.
        cpu_offload: put the values into host memory.
        rank0_only: the first rank of the mesh gets the dict, all others an empty one.

    Returns:
        Loads with ``strict=True`` into the model that was never wrapped.
    """
    check_flags(cpu_offload=cpu_offload, rank0_only=rank0_only)
    dedication = dedications.of(model)
    dedication.settle_for(Call.GET_MODEL_STATE_DICT)
    keep = not rank0_only or dedication.owner_map.rank == 0
    device = torch.device("cpu") if cpu_offload else dedication.device
    state: dict[str, Any] = {}
    walk = live_values(dedication)
    check_names(dedication, {name for name, _ in walk})
    whole = _whole_matrices(dedication, keep, device)
    dedicated = dedicated_names(dedication)
    for name, value in walk:
        if name in dedicated:
            state.update({name: whole[name]} if keep else {})
            continue
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            state[name] = _copy(full, device)
    return state


@torch.no_grad()
def set_model_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True
) -> IncompatibleKeys:
    """Load a whole state dict, from DMuon or from the plain model. Collective over the mesh.

    Every rank passes the full dict, or the first rank alone and all others an empty one.
    Everything is checked on all ranks before anything changes. Values are converted to the dtype
    of the weights, as ``load_state_dict`` does.

    Args:
        model: as given to ``dedicate_params``.
        state_dict: whole tensors under original names.
        strict: refuse missing and unexpected names; otherwise load what fits and report.

    Raises:
        StateDictError: the same on every rank, listing every name that does not fit.
    """
    check_flags(strict=strict)
    dedication = dedications.of(model)
    dedication.settle_for(Call.SET_MODEL_STATE_DICT)
    courier = Courier(dedication, state_dict)
    targets = dict(live_values(dedication))
    report = _check(dedication, targets, courier, strict)
    dedicated = dedicated_names(dedication)
    for name, target in targets.items():
        if name in courier.described and name not in dedicated:
            value = courier.fetch(name)
            if is_extra_state(name):
                module_of(dedication, name).set_extra_state(value)
            else:
                _load_symmetric(target, value)
    for block in dedication.engine.blocks:
        for parcel in block.parcels:
            _load_parcel(parcel, courier)
    dedication.unfilled -= set(courier.described)
    dedication.engine.publish(wait=True)
    return report


@torch.no_grad()
def nonfinite_weights(model: nn.Module) -> list[str]:
    """Names of the weights and buffers that hold NaN or infinity, in the order of the model.

    Collective over the mesh, and equal on every rank. Each rank looks at what it holds, so nothing
    is gathered; it waits for the device, so it is for the time before a checkpoint and not for
    every step.
    """
    dedication = dedications.of(model)
    dedication.settle_for(Call.NONFINITE_WEIGHTS)
    mine = [name for name, value in _held(dedication) if not bool(value.isfinite().all())]
    found = {name for names in gather_objects(dedication, mine) for name in names}
    return [name for name, _ in live_values(dedication) if name in found]


def _held(dedication: Dedication) -> Iterator[tuple[str, torch.Tensor]]:
    """What this rank holds of weights and buffers: matrices it owns, shards of the others."""
    for block in dedication.engine.blocks:
        for parcel in block.parcels:
            if parcel.master is not None:
                views = parcel.views(parcel.master)
                yield from zip((param.name for param in parcel.params), views, strict=True)
    dedicated = dedicated_names(dedication)
    for name, value in live_values(dedication):
        if isinstance(value, torch.Tensor) and name not in dedicated:
            yield name, value.to_local() if isinstance(value, DTensor) else value


def live_values(dedication: Dedication) -> list[tuple[str, Any]]:
    """Names and live values in the order of ``model.state_dict()``. Local."""
    with dedication.guards_off():
        state = dedication.model.state_dict(keep_vars=True)
    return [(original_name(name), value) for name, value in state.items()]


def check_names(dedication: Dedication, names: set[str]) -> None:
    """Refuse state-dict hooks that rename or replace what lives on owners; equal on all ranks."""
    hidden = sorted(dedicated_names(dedication) - names)
    if hidden:
        raise OwnershipError(
            f"a state_dict hook of this model renames or drops {hidden[0]} and {len(hidden) - 1} "
            "more; such hooks would see placeholders, so remove them before dedicate_params"
        )


def module_of(dedication: Dedication, name: str) -> nn.Module:
    """The module that a name in the state dict belongs to. Local."""
    path = name.rpartition(".")[0]
    named = dedication.model.named_modules(remove_duplicate=False)
    modules = {original_name(path): module for path, module in named}
    return modules[path]


def dedicated_names(dedication: Dedication) -> set[str]:
    """Every name of every dedicated parameter. Local."""
    return {name for p in dedication.params for name in (p.name, *p.aliases)}


def _whole_matrices(
    dedication: Dedication, keep: bool, device: torch.device
) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = {}
    for block in dedication.engine.blocks:
        for parcel in block.parcels:
            flat = parcel.gather_full(parcel.master)
            if not keep:
                continue
            for param, view in zip(parcel.params, parcel.views(flat), strict=True):
                value = _copy(view, device, param.dtype)
                whole.update(dict.fromkeys((param.name, *param.aliases), value))
    return whole


def _copy(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return value.detach().to(device=device, dtype=dtype or value.dtype, copy=True).contiguous()


def _check(
    dedication: Dedication, targets: Mapping[str, Any], courier: Courier, strict: bool
) -> IncompatibleKeys:
    missing = [name for name in targets if name not in courier.described]
    unexpected = [name for name in courier.described if name not in targets]
    problems = list(courier.problems)
    if strict:
        problems += [f"{name}: missing" for name in missing]
        problems += [f"{name}: not in this model" for name in unexpected]
    for name, target in targets.items():
        if is_extra_state(name):
            continue
        if isinstance(target, torch.Tensor) and target.is_meta and name in courier.described:
            problems.append(f"{name}: is on the meta device; call model.to_empty(device=...) first")
        kind, shape, _ = courier.described.get(name, ("absent", None, None))
        if kind == "absent" or not isinstance(target, torch.Tensor):
            continue
        if kind != "tensor":
            problems.append(f"{name}: is {kind}, needs a whole dense tensor")
        elif shape != target.shape:
            problems.append(f"{name}: has shape {list(shape or ())}, needs {list(target.shape)}")
    raise_together(dedication, "the model state dict", problems)
    return IncompatibleKeys(missing, unexpected)


def _load_symmetric(target: Any, value: Any) -> None:
    if not isinstance(target, torch.Tensor):
        return
    if isinstance(target, DTensor):
        source = value.detach().to(device=target.device, dtype=target.dtype)
        mesh, placements = target.device_mesh, target.placements
        share = distribute_tensor(source, mesh, placements, src_data_rank=None)
        target.to_local().copy_(share.to_local())
    else:
        target.detach().copy_(value)


def _load_parcel(parcel: Parcel, courier: Courier) -> None:
    for param in parcel.params:
        held = [name for name in (param.name, *param.aliases) if name in courier.described]
        if not held:
            continue
        value = courier.fetch(held[-1])  # as load_state_dict, which goes through all in order
        if parcel.master is not None:
            parcel.view(parcel.master, param).copy_(value)
