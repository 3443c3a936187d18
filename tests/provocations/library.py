"""Mistakes with the library that need a process group; each is given a `Ready`."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from provocations.form import Provocation
from tiny import build, is_proj, loss_of, tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon
from dmuon import OwnershipError, SetupError, StateDictError


@dataclass
class Ready:
    """A model that trains on one rank, a mesh for others, and a folder."""

    model: nn.Module
    optimizer: dmuon.Muon
    mesh: DeviceMesh
    folder: Path

    def state(self, **changed: Any) -> dict[str, Any]:
        """The model's state dict with some of it changed."""
        return {**dmuon.get_model_state_dict(self.model), **changed}

    def save(self, path: Any = None, **given: Any) -> None:
        """Save to a new folder, or to ``path``."""
        path = self.folder / "new" if path is None else path
        dmuon.save_checkpoint(path, self.model, self.optimizer, **given)


def _dedicate(**given: Any) -> Callable[[Ready], object]:
    given = {"predicate": is_proj, **given}
    return lambda ready: dmuon.dedicate_params(build(), **{"mesh": ready.mesh, **given})


def _muon(**settings: Any) -> Callable[[Ready], object]:
    return lambda ready: dmuon.Muon(ready.model, **settings)


def _policy(dtype: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=dtype)


def _hooked(ready: Ready, hook: Callable[..., None]) -> None:
    model = build()
    model.register_state_dict_post_hook(hook)
    dmuon.dedicate_params(model, ready.mesh, is_proj)
    dmuon.save_checkpoint(ready.folder / "hooked", model)


def _add_text(_model: nn.Module, state: dict[str, Any], *_: object) -> None:
    state["note"] = "mine"


def _drop_owned(_model: nn.Module, state: dict[str, Any], *_: object) -> None:
    del state["layers.0.q_proj.weight"]


def _differentiate_twice(ready: Ready) -> None:
    loss_of(ready.model, tokens(0)).backward(create_graph=True)


def _tied(ready: Ready) -> None:
    model = build()
    model.layers[1].q_proj.weight = model.layers[0].q_proj.weight
    splits = {"layers.0.q_proj.weight": dmuon.Split(2), "layers.1.q_proj.weight": dmuon.Split(3)}
    dmuon.dedicate_params(model, ready.mesh, is_proj, splits=lambda name, _: splits.get(name))


ROWS = [
    # dedicate_params
    Provocation(
        _dedicate(mesh=None),
        SetupError,
        "NoneType",
        "mesh must be a DeviceMesh",
        "init_device_mesh",
    ),
    Provocation(
        lambda ready: dmuon.dedicate_params(3, ready.mesh),
        SetupError,
        "got int",
        "model must be a torch.nn.Module",
    ),
    Provocation(
        _dedicate(predicate="x"), SetupError, "predicate", "are functions of (name, object)"
    ),
    Provocation(
        _dedicate(predicate=lambda name, param: None),
        SetupError,
        "the predicate matches no parameter",
        "print the names",
        "pass predicate=",
    ),
    Provocation(
        _dedicate(predicate=lambda name, param: True),
        SetupError,
        "layers.0.norm1.weight has shape (24,)",
        "Muon orthogonalises matrices",
        "Leave it out of the predicate",
    ),
    Provocation(
        _dedicate(mp_policy=torch.bfloat16),
        SetupError,
        "got torch.bfloat16",
        "mp_policy must be a torch.distributed.fsdp.MixedPrecisionPolicy",
    ),
    Provocation(
        _dedicate(mp_policy=_policy(torch.int8)),
        SetupError,
        "got torch.int8",
        "mp_policy.param_dtype must be a floating-point dtype",
    ),
    Provocation(
        _dedicate(timeout=30),
        SetupError,
        "got 30",
        "timeout must be a datetime.timedelta or None",
    ),
    Provocation(
        lambda ready: dmuon.dedicate_params(build().double(), ready.mesh, is_proj),
        SetupError,
        "is torch.float64",
        "dedicated parameters are float32, bfloat16 or float16",
        "leave it out of the predicate",
    ),
    Provocation(_tied, SetupError, "for one tied parameter", "it must answer all names alike"),
    Provocation(
        lambda ready: dmuon.dedicate_params(ready.model, ready.mesh),
        SetupError,
        "this model has dedicated parameters already",
        "call dedicate_params once",
        "on the outermost module",
    ),
    Provocation(
        lambda ready: _hooked(ready, _add_text),
        OwnershipError,
        "a state_dict hook of this model adds note, a str",
        "no checkpoint keeps",
        "return it from get_extra_state",
    ),
    Provocation(
        lambda ready: _hooked(ready, _drop_owned),
        OwnershipError,
        "a state_dict hook of this model renames or drops layers.0.q_proj.weight",
        "such hooks would see placeholders",
        "remove them before dedicate_params",
    ),
    # Muon
    Provocation(_muon(lr="0.1"), SetupError, "lr", "must be a number of at least 0", "got '0.1'"),
    Provocation(
        _muon(adamw_lr=None), SetupError, "adamw_lr", "must be a number of at least 0", "got None"
    ),
    Provocation(
        _muon(momentum="x"), SetupError, "momentum", "must be a number in [0, 1)", "got 'x'"
    ),
    Provocation(_muon(eps=0), SetupError, "eps", "must be a number above 0", "got 0"),
    Provocation(
        _muon(adamw_betas=0.9), SetupError, "got 0.9", "adamw_betas must be two numbers in [0, 1)"
    ),
    Provocation(_muon(nesterov="no"), SetupError, "got 'no'", "nesterov must be True or False"),
    Provocation(
        _muon(ns_dtype="bf16"), SetupError, "got 'bf16'", "ns_dtype must be None or a torch dtype"
    ),
    Provocation(
        _muon(ns_coefficients=[("a", 1, 2)]),
        SetupError,
        "ns_coefficients",
        "must be one (a, b, c), or one a step; got the entry ('a', 1, 2)",
    ),
    Provocation(
        _muon(param_groups={"params": []}),
        SetupError,
        "got dict",
        "param_groups must be a list of dictionaries",
    ),
    Provocation(
        _muon(betas=(0.9, 0.95), fused=True),
        SetupError,
        "Muon(...) was given what it does not take",
        "betas is adamw_betas here; fused has no counterpart here, leave it out",
        "It takes model, lr,",
    ),
    Provocation(
        _muon(param_groups=[{"params": [], "lrr": 1}]),
        SetupError,
        "param_groups[0] was given what it does not take",
        "lrr is unknown, the nearest is lr",
        "It takes params, lr,",
    ),
    Provocation(
        _muon(param_groups=[{"adamw_lr": 1}]),
        SetupError,
        "param_groups[0] has no 'params'",
        "a list of parameters or of their names",
    ),
    Provocation(
        _muon(param_groups=[{"params": ["norm.weight"], "weight_decay": 0.0}]),
        SetupError,
        "param_groups[0] sets weight_decay",
        "is for hidden matrices, and has none of them (norm.weight, ...)",
        "its parameters take adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay",
    ),
    Provocation(
        _muon(param_groups=[{"params": ["layers.0.q_proj.weight"], "lr": 1, "adamw_eps": 1}]),
        SetupError,
        "param_groups[0] sets adamw_eps",
        "is for what AdamW updates, and has none of them",
        "its parameters take lr, momentum,",
    ),
    Provocation(
        lambda ready: dmuon.Muon(build()),
        SetupError,
        "this TinyModel has no dedicated parameters",
        "call dmuon.dedicate_params",
        "on the outermost module first",
    ),
    Provocation(
        lambda ready: ready.optimizer.add_param_group({"params": []}),
        OwnershipError,
        "groups cannot be added later",
        "pass param_groups to dmuon.Muon",
    ),
    # what plain PyTorch would do otherwise
    Provocation(
        lambda ready: ready.model.state_dict(),
        OwnershipError,
        "the hidden matrices of this model live on their owner ranks",
        "cannot see them",
        "use dmuon.get_model_state_dict(model)",
    ),
    Provocation(
        lambda ready: ready.optimizer.state_dict(),
        OwnershipError,
        "the state of this optimizer lives on the owners",
        "on the owners; call dmuon.get_optimizer_state_dict(model, optimizer)",
        "on every rank",
    ),
    Provocation(
        lambda ready: ready.optimizer.load_state_dict({}),
        OwnershipError,
        "the state of this optimizer lives on the owners",
        "on the owners; call dmuon.set_optimizer_state_dict(model, optimizer, state_dict)",
        "on every rank",
    ),
    Provocation(
        lambda ready: copy.deepcopy(ready.optimizer),
        OwnershipError,
        "this optimizer cannot be copied or pickled",
        "call dmuon.get_optimizer_state_dict",
    ),
    Provocation(
        lambda ready: ready.optimizer._step_supports_amp_scaling,
        OwnershipError,
        "torch.amp.GradScaler cannot unscale gradients",
        "that live on owners",
        "use bfloat16",
    ),
    Provocation(
        _differentiate_twice,
        OwnershipError,
        "a backward with create_graph=True",
        "second derivatives are not supported",
    ),
    Provocation(
        lambda ready: torch.optim.AdamW(ready.model.parameters()).step(),
        SetupError,
        "this AdamW was given layers.0.q_proj.weight and ",
        "gradients dedicate_params keeps for the owners, so it would never update them",
        "use dmuon.Muon(model), which runs AdamW on all other parameters",
    ),
    # looking and clipping
    Provocation(
        lambda ready: dmuon.clip_grad_norm_(ready.model.parameters(), 1.0),
        SetupError,
        "got generator",
        "gradients are found by the model or its dmuon.Muon",
        "give the model",
    ),
    Provocation(
        lambda ready: dmuon.no_sync(ready.optimizer).__enter__(),
        SetupError,
        "got Muon",
        "this needs the model that was given to dmuon.dedicate_params",
    ),
    Provocation(
        lambda ready: dmuon.clip_grad_norm_(ready.optimizer, None),
        ValueError,
        "got None",
        "max_norm must be a number of at least 0",
    ),
    Provocation(
        lambda ready: dmuon.get_owned_params(ready.model, "a"),
        ValueError,
        "got 'a'",
        "rank must be in [0, 1), the ranks of the mesh",
    ),
    Provocation(
        lambda ready: dmuon.watch_updates(ready.model).__enter__(),
        SetupError,
        "TinyModel",
        "watch_updates takes a dmuon.Muon",
        "with dmuon.watch_updates(optimizer)",
    ),
    # state dicts
    Provocation(
        lambda ready: dmuon.get_optimizer_state_dict(ready.model, None),
        SetupError,
        "this NoneType is not the dmuon.Muon that was built for this model",
        "give the model and its own",
    ),
    Provocation(
        lambda ready: dmuon.set_model_state_dict(ready.model, ready.state(head=torch.ones(1))),
        StateDictError,
        "head: not in this model",
        "nothing was loaded",
        "give one of such a model",
    ),
    Provocation(
        lambda ready: dmuon.set_model_state_dict(ready.model, None),
        StateDictError,
        "a NoneType is no dictionary of names and tensors",
        "nothing was loaded",
        "give one of such a model",
    ),
]
