"""Where the engine is called from: hooks on modules, on their outputs and on leaves."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from dmuon import torch_internals
from dmuon.block import Block
from dmuon.parameter import DedicatedParam

_DEPTH = 3  # of objects inside objects that are looked into


class Served(Protocol):
    """What is called: the engine. ``index`` is that of a block."""

    def pre_forward(self, index: int) -> None:
        """Before the forward of the block's module."""

    def post_forward(self, index: int, output: object) -> None:
        """After it, with what it returned."""

    def post_use(self, index: int, output: object) -> None:
        """After the forward of a module inside the block that holds some of its matrices."""

    def on_gradient(self, index: int, param: DedicatedParam) -> None:
        """When a running backward has left its gradient in ``param``."""


class Watched(NamedTuple):
    """What ``watch`` found in an output.

    Attributes:
        has_hook: some tensor that autograd made got the hook.
        has_tensor: there was any tensor; a class may hide them.
    """

    has_hook: bool
    has_tensor: bool


def install(engine: Served, index: int, block: Block) -> None:
    """Make ``engine`` serve ``block`` in forward and backward."""

    def before(module: nn.Module, args: Any) -> None:
        with torch_internals.outside_inference_mode():
            engine.pre_forward(index)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        with torch_internals.outside_inference_mode():
            engine.post_forward(index, output)

    block.module.register_forward_pre_hook(torch_internals.not_compiled(before), prepend=True)
    block.module.register_forward_hook(torch_internals.not_compiled(after))
    for module in {site for param in block.params for site, _ in param.sites} - {block.module}:
        _install_inside(engine, index, module)
    for param in block.params:
        hook = torch_internals.not_compiled(_leaf_hook(weakref.ref(engine), index, param))
        torch_internals.hook_leaf(param.param, hook)


def _install_inside(engine: Served, index: int, module: nn.Module) -> None:
    """Watch what a module with matrices gives out, for what its block does not give out itself.

    A router's logits kept for an auxiliary loss reach the router's weight in backward before
    anything that the block returned. Inside a compiled block there are no such tensors to hook.
    """

    def after_use(module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            engine.post_use(index, output)

    module.register_forward_hook(after_use)


def watch(output: object, on_backward: Callable[[], None]) -> Watched:
    """Call ``on_backward`` when backward reaches a tensor of ``output``.

    Only tensors that autograd made are hooked; leaves would keep the hook.
    """
    tensors = list(_tensors(output, _DEPTH))
    hooked = [tensor for tensor in tensors if tensor.grad_fn is not None]
    for tensor in hooked:
        tensor.register_hook(lambda grad: on_backward())
    return Watched(bool(hooked), bool(tensors))


def _tensors(value: object, depth: int) -> Iterator[torch.Tensor]:
    """Also those in dataclasses and other objects, which pytree takes for leaves."""
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and not isinstance(leaf, nn.Module | type):
            yield from _tensors(list(getattr(leaf, "__dict__", {}).values()), depth - 1)


def _leaf_hook(
    engine: weakref.ref[Served], index: int, param: DedicatedParam
) -> Callable[[torch.Tensor], None]:
    """A hook that keeps nothing alive: the garbage collector cannot see into a leaf's hooks."""
    weak_param = weakref.ref(param)

    def hook(leaf: torch.Tensor) -> None:
        alive, owned = engine(), weak_param()
        if alive is not None and owned is not None:
            alive.on_gradient(index, owned)

    return hook
