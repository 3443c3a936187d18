"""The front door: give every hidden matrix of a model its owner."""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from dmuon import dedication as dedications
from dmuon import mesh as meshes
from dmuon import other_optimizers, torch_internals, wrapping
from dmuon.agreement import check_same_plan
from dmuon.boundaries import Boundary
from dmuon.dedication import Dedication
from dmuon.errors import SetupError
from dmuon.flags import check_flags
from dmuon.owner_map import OwnerMap
from dmuon.packing import Packing, check_packing
from dmuon.parameter import DedicatedParam
from dmuon.partition import Matrix, Plan, make_plan
from dmuon.selection import Predicate, Splits, is_hidden_matrix, select


def dedicate_params(  # noqa: PLR0913 - the public signature
    model: nn.Module,
    mesh: DeviceMesh,
    predicate: Predicate | None = is_hidden_matrix,
    *,
    replicate_mesh: DeviceMesh | None = None,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    hook_boundary_predicate: Boundary | None = None,
    splits: Splits | None = None,
    packing: Packing = "auto",
    timeout: timedelta | None = None,
) -> Plan:
    """Give each parameter chosen by ``predicate`` one owner rank. Collective over ``mesh``.

    Afterwards only the owner holds the matrix; call ``fully_shard`` on the layers and the root as
    usual (it leaves dedicated parameters alone), then build ``dmuon.Muon(model)``.

    Args:
        model: the outermost module, before ``fully_shard``; may be on the meta device.
        mesh: 1D, or 2D named ``("replicate", "shard")``.
        predicate: ``(name, parameter) -> bool``; may choose matrices ``(M, N)``, stacks of
            matrices ``(E, M, N)``, and the weights of convolutions (flattened, one matrix a group).
            None chooses nothing: AdamW trains all, a baseline in which everything else is equal.
        replicate_mesh: the replicate axis, when ``mesh`` is the 1D shard axis of a 2D layout.
        reshard_after_forward: free the weights of other owners between forward and backward
            (less memory, one more broadcast) or keep them. Those of the last block, with which
            backward begins, are kept either way, unless gradients are disabled.
        mp_policy: as for ``fully_shard``: ``param_dtype`` is the dtype weights travel and compute
            in, ``reduce_dtype`` that of gradients on their way. Master weights stay float32.
        hook_boundary_predicate: ``(module name, module) -> bool``; which modules make their
            matrices whole together. By default the modules given to ``fully_shard``.
        splits: ``(name, parameter) -> dmuon.Split or None``: which parameters are several
            projections side by side, each to be updated on its own; asked about all of them.
        packing: what travels together along ``shard``: "owner", the matrices that one rank owns in
            a block, broadcast and reduced rank after rank; "block", all of a block in one
            all-gather and one reduce-scatter, every rank's part padded to the largest, unless its
            matrices differ in dtype; "auto", for each block what a model of the network says is
            clearly faster (`dmuon.packing`): with gloo always "owner".
        timeout: of every collective of ours; by default that of the mesh's process group.

    Returns:
        The plan, equal on all ranks; ``print`` shows it.

    Raises:
        SetupError: on every rank, for a wrong mesh, order of calls or choice of parameters, or
            when ranks disagree about the model.
    """
    _check_arguments(model, predicate, mp_policy, hook_boundary_predicate, splits)
    check_packing(packing)
    check_flags(reshard_after_forward=reshard_after_forward)
    if not isinstance(timeout, timedelta | None):
        raise SetupError(f"timeout must be a datetime.timedelta or None, got {timeout!r}")
    meshes.check_mesh(mesh, replicate_mesh)
    owner_map = meshes.make_owner_map(mesh, replicate_mesh, timeout or meshes.default_timeout(mesh))
    dedication = Dedication(
        model=model,
        plan=Plan((), (), owner_map.num_owners),
        owner_map=owner_map,
        params=[],
        device=meshes.device_of(mesh),
        mp_policy=mp_policy or MixedPrecisionPolicy(),
        reshard_after_forward=reshard_after_forward,
        hook_boundary=hook_boundary_predicate,
        packing=packing,
    )
    problem: Exception | None = None
    try:
        _choose(dedication, predicate, splits)
    except Exception as error:  # functions of the user may raise anything
        problem = error
    check_same_plan(dedication, problem)
    for param in dedication.params:
        param.owner = dedication.plan.owner_of(param.name)
        _keep_or_drop(param, owner_map, dedication.device)
    _install(dedication)
    other_optimizers.watch(dedication)
    return dedication.plan


def _check_arguments(
    model: nn.Module, predicate: object, mp_policy: object, boundary: object, splits: object
) -> None:
    if not isinstance(model, nn.Module):
        raise SetupError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    optional = (predicate, boundary, splits)
    if not all(f is None or callable(f) for f in optional):
        raise SetupError(
            "predicate, hook_boundary_predicate and splits are functions of (name, object)"
        )
    if not isinstance(mp_policy, MixedPrecisionPolicy | None):
        raise SetupError(
            f"mp_policy must be a torch.distributed.fsdp.MixedPrecisionPolicy, got {mp_policy!r}"
        )
    param_dtype = None if mp_policy is None else mp_policy.param_dtype
    if param_dtype is not None and not param_dtype.is_floating_point:
        raise SetupError(f"mp_policy.param_dtype must be a floating-point dtype, got {param_dtype}")
    if not dist.is_initialized():
        raise SetupError("there is no process group; call init_process_group or use torchrun first")


def _choose(dedication: Dedication, predicate: Predicate | None, splits: Splits | None) -> None:
    """Local: what is dedicated, how it is split, and to whom it goes."""
    model = dedication.model
    _check_order(model)
    _check_device(model, dedication.device)
    dedication.params = select(model, predicate, splits)
    blocks = dedication.blocks_of_params()
    matrices = [
        Matrix(param.name, tuple(param.shape), block, param.layout)
        for param, block in zip(dedication.params, blocks, strict=True)
    ]
    dedication.plan = make_plan(matrices, dedication.owner_map.num_owners)


def _check_order(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if dedications.find(module) is not None or dedications.is_taken(module):
            raise SetupError(
                f"{name or 'this model'} has dedicated parameters already; call dedicate_params "
                "once, on the outermost module"
            )
        if isinstance(module, FSDPModule):
            raise SetupError(
                f"{name or 'this model'} is wrapped by fully_shard already; call dedicate_params "
                "first, then fully_shard, then Muon"
            )


def _check_device(model: nn.Module, device: torch.device) -> None:
    for name, param in model.named_parameters():
        if param.device.type not in ("cpu", "meta", device.type):
            raise SetupError(
                f"{name} is on {param.device}, the mesh on {device.type}; make the mesh for the "
                "device the model trains on: init_device_mesh(device_type, shape)"
            )


def _keep_or_drop(param: DedicatedParam, owner_map: OwnerMap, device: torch.device) -> None:
    if param.param.is_meta:
        return
    route = owner_map.route(param.owner)
    if route.is_owner or any(leg.is_root for leg in route.start):
        param.param.data = param.param.data.to(device)
    else:
        param.hide(param.dtype, device)


def _install(dedication: Dedication) -> None:
    """Guards, and hooks that live on the outermost module whatever is wrapped later."""
    attributes: dict[nn.Module, set[str]] = {}
    for param in dedication.params:
        for module, attribute in param.sites:
            attributes.setdefault(module, set()).add(attribute)
    for module, names in attributes.items():
        wrapping.hide(module, names)
        module.register_state_dict_pre_hook(dedication.guard)
        module.register_load_state_dict_pre_hook(dedication.guard)
    for module in {dedication.model, *attributes}:  # found on the instance by copy and pickle
        module.__dict__["__deepcopy__"] = dedication.refuse_copy
        module.__dict__["__reduce_ex__"] = dedication.refuse_copy
    dedications.attach(dedication)
    for module in dedication.model.modules():
        if module is not dedication.model:
            _attach_zero_grad(dedication, module)
    _attach_to_model(dedication)


def _attach_zero_grad(dedication: Dedication, module: nn.Module) -> None:
    """Make ``module.zero_grad()`` of a part of the model reach the owners of its matrices."""
    inside = set(module.modules())
    params = [p for p in dedication.params if any(site in inside for site, _ in p.sites)]
    plain_zero_grad: Callable[[bool], None] = module.zero_grad
    if not params:
        return

    def zero_grad(set_to_none: bool = True) -> None:
        dedication.reshard_symmetric()
        plain_zero_grad(set_to_none)
        if dedication.has_started:
            dedication.engine.discard_gradients(params)

    module.__dict__["zero_grad"] = zero_grad


def _attach_to_model(dedication: Dedication) -> None:
    """What every use of the outermost module must bring about."""
    model = dedication.model
    plain_zero_grad: Callable[[bool], None] = model.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        dedication.reshard_symmetric()
        plain_zero_grad(set_to_none)
        if dedication.has_started:
            dedication.engine.zero_grad()

    model.__dict__["zero_grad"] = zero_grad

    def before(module: nn.Module, args: object) -> None:
        dedication.before_forward()

    def after(module: nn.Module, args: object, output: object) -> None:
        dedication.after_forward(output)

    model.register_forward_pre_hook(torch_internals.not_compiled(before), prepend=True)
    model.register_forward_hook(torch_internals.not_compiled(after))
