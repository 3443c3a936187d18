"""Living beside ``fully_shard``: it must leave dedicated parameters alone, called plainly.

``fully_shard`` asks each module for ``named_parameters(recurse=False)``. Between
``dedicate_params`` and the first use, modules that own dedicated parameters answer that question
without them. It is an override of a public method on those instances alone, taken back by
``reveal``; no function of torch is patched. Passing ``ignored_params`` to ``fully_shard`` with the
values of ``get_dedicated_params(model)`` does the same by hand.
"""

import weakref
from collections.abc import Iterator
from typing import NoReturn, Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule

from dmuon.errors import OwnershipError


def hide(module: nn.Module, attributes: set[str]) -> None:
    """Leave ``attributes`` out when ``module`` is asked for its own parameters alone."""
    everything = type(module).named_parameters

    def named_parameters(
        prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, param in everything(module, prefix, recurse, remove_duplicate):
            if recurse or name.rpartition(".")[2] not in attributes:
                yield name, param

    module.__dict__["named_parameters"] = named_parameters


def reveal(module: nn.Module) -> None:
    """Take ``hide`` back."""
    module.__dict__.pop("named_parameters", None)


class Syncing(Protocol):
    """What `follow_gradient_sync` sets: the engine."""

    sync_gradients: bool


def set_gradient_sync(model: nn.Module, engine: Syncing, is_on: bool) -> None:
    """Whether the next backward sends gradients, those of ``fully_shard`` and ours."""
    engine.sync_gradients = is_on
    for module in model.modules():
        if isinstance(module, FSDPModule):
            FSDPModule.set_requires_gradient_sync(module, is_on, recurse=False)


def follow_gradient_sync(model: nn.Module, engine: Syncing) -> None:
    """Let FSDP2's own ``set_requires_gradient_sync`` on the outermost module speak for us too.

    On a module inside, or without its children, it would send some gradients and keep others.
    """
    weak_model, weak_engine = weakref.ref(model), weakref.ref(engine)

    def set_all(requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        root, driver = weak_model(), weak_engine()
        if not recurse:
            refuse()
        if root is not None and driver is not None:
            set_gradient_sync(root, driver, requires_gradient_sync)

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OwnershipError(
            "set_requires_gradient_sync on a part of a model with dedicated parameters is not "
            "supported; call it on the outermost module, or use dmuon.no_sync(model)"
        )

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.__dict__["set_requires_gradient_sync"] = set_all if module is model else refuse
