"""When what happens: forward and backward hooks, prefetch, and the fixed order of reductions.

Every decision here depends on the module tree and on how often a hook fired, which is the same on
all ranks, and never on values. Reductions start in descending order of the blocks, each as soon as
it and all blocks after it have their gradients; a rank that lacks a gradient sends zeros at the
end of backward, in the same order.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from dmuon import torch_internals
from dmuon.block import Block
from dmuon.counters import Counters
from dmuon.errors import OwnershipError
from dmuon.ledger import GradientLedger
from dmuon.parameter import DedicatedParam
from dmuon.reduction import StartReduction


class Engine:
    """Drives the blocks of one model through forward, backward and step.

    Attributes:
        sync_gradients: whether the next backward sends its gradients to the owners.
        has_unsent: a backward under ``no_sync`` has left gradients that no other has sent yet.
    """

    def __init__(
        self,
        blocks: list[Block],
        ledger: GradientLedger,
        start_reduction: StartReduction,
        reduce_dtype: torch.dtype | None,
        reshard_after_forward: bool,
        can_recover: Callable[[], bool] = lambda: True,
    ) -> None:
        self.blocks = blocks
        self.ledger = ledger
        self.counters = Counters()
        self.weights_version = 0
        self.sync_gradients = True
        self.has_unsent = False
        self._can_recover = can_recover
        self._start_reduction = start_reduction
        self._reduce_dtype = reduce_dtype
        self._reshard_after_forward = reshard_after_forward
        self._next_to_reduce = len(blocks) - 1
        self._ready: set[int] = set()
        self._backward_end: weakref.ref[Callable[[], None]] | None = None  # while one runs
        for index, block in enumerate(blocks):
            self._register(index, block)

    # Weights ------------------------------------------------------------------------------

    def pre_forward(self, index: int) -> None:
        """Show the block's weights and send for the next block's. Collective over the row."""
        block = self.blocks[index]
        if block.in_backward and torch_internals.in_backward():
            self._unshard(block)
            return
        self._recover_from_failed_backward()
        self._unshard(block)
        self._prefetch(index + 1)

    def post_forward(self, index: int, output: object) -> None:
        """Free the block's weights and make sure that backward brings them back. Local."""
        block = self.blocks[index]
        if block.in_backward and torch_internals.in_backward():
            return
        if not torch.is_grad_enabled():
            block.reshard()
            return
        are_hooked, are_seen = self._hook_outputs(index, output)
        if not are_seen:  # nothing will bring the weights back, so they stay
            return
        if self._reshard_after_forward or not are_hooked:
            block.reshard()

    def pre_backward(self, index: int, version: int) -> None:
        """Show the block's weights and send for the previous block's. Collective over the row.

        Raises:
            OwnershipError: for a backward that would compute with other weights than the forward,
                which used those of ``version``, or that would itself be differentiated.
        """
        block = self.blocks[index]
        if version != self.weights_version:
            raise OwnershipError(
                f"the weights of {block.name or 'the model'} changed between forward and backward "
                "(a step or a loaded state dict); run the forward again"
            )
        if torch.is_grad_enabled():
            raise OwnershipError(
                "a backward with create_graph=True would need weights after they are freed; "
                "second derivatives are not supported for dedicated parameters"
            )
        self._enter_backward()
        block.in_backward = True
        self._unshard(block)
        if self._reshard_after_forward:
            self._prefetch(index - 1)

    def settle_weights(self) -> None:
        """Wait for weights on their way: to be arrived here or published. Local."""
        for block in self.blocks:
            block.finish_unshard()
            for parcel in block.parcels:
                parcel.drain()

    def publish(self, *, wait: bool) -> None:
        """After the owners changed weights: make every other copy stale, send the new ones.

        Collective over the columns of a grid; sends nothing on a 1D mesh.
        """
        self.weights_version += 1
        for block in self.blocks:
            for parcel in block.parcels:
                parcel.update_wire()
                parcel.start_publish(self.counters)
                if wait:
                    parcel.drain()

    def _unshard(self, block: Block) -> None:
        block.start_unshard(self.weights_version, self.counters)
        block.finish_unshard()

    def _prefetch(self, index: int) -> None:
        if 0 <= index < len(self.blocks):
            self.blocks[index].start_unshard(self.weights_version, self.counters)

    # Gradients ----------------------------------------------------------------------------

    def on_gradient(self, index: int, param: DedicatedParam) -> None:
        """Autograd is done with one leaf. Starts collectives over the row when it was the last."""
        self._enter_backward()
        block = self.blocks[index]
        if not block.note_gradient(param):
            return
        if not block.is_frozen_in_part:
            block.in_backward = False
            block.reshard()
        if self.sync_gradients:
            self._ready.add(index)
            while self._next_to_reduce in self._ready:
                self._reduce_next()

    def settle_gradients(self) -> None:
        """Wait until the owners have all gradients. Collective on a grid.

        Raises:
            OwnershipError: when gradients accumulated under ``no_sync`` were never sent.
        """
        if self.has_unsent:
            raise OwnershipError(
                "gradients accumulated under dmuon.no_sync(model) have not been sent to the "
                "owners; run the last backward before a step outside of it, or zero_grad()"
            )
        self.ledger.settle(self.counters)

    def zero_grad(self) -> None:
        """Forget all gradients, local and reduced. Collective on a grid."""
        self.has_unsent = False
        self.ledger.drop(self.counters)
        for block in self.blocks:
            for param in block.params:
                param.param.grad = None

    def _reduce_next(self) -> None:
        block = self.blocks[self._next_to_reduce]
        self._next_to_reduce -= 1
        reduction = block.start_reduction(self._start_reduction, self._reduce_dtype, self.counters)
        self.ledger.add(reduction, self.counters)

    def _enter_backward(self) -> None:
        self._recover_from_failed_backward()
        if self._backward_end is not None:
            return
        for block in self.blocks:
            block.reset_arrivals()

        def end() -> None:
            self._leave_backward()

        self._backward_end = weakref.ref(end)
        torch_internals.call_after_backward(end)

    def _leave_backward(self) -> None:
        self.has_unsent = not self.sync_gradients
        while self.sync_gradients and self._next_to_reduce >= 0:
            self._reduce_next()
        self._reset_backward()

    def _reset_backward(self) -> None:
        for block in self.blocks:
            block.reshard()
            block.reset_arrivals()
        self._ready.clear()
        self._next_to_reduce = len(self.blocks) - 1
        self._backward_end = None

    def _recover_from_failed_backward(self) -> None:
        """Start afresh when autograd has dropped the end of the last backward without calling it.

        Raises:
            OwnershipError: beside ``fully_shard``, which would go on with wrong gradients.
        """
        if self._backward_end is None or self._backward_end() is not None:
            return
        if not self._can_recover():
            raise OwnershipError(
                "a backward ended with an exception; fully_shard cannot continue after that "
                "without wrong gradients. Build the model again and load the last checkpoint"
            )
        self._reset_backward()

    # Hooks --------------------------------------------------------------------------------

    def _register(self, index: int, block: Block) -> None:
        def before(module: nn.Module, args: Any) -> None:
            with torch_internals.outside_inference_mode():
                self.pre_forward(index)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            with torch_internals.outside_inference_mode():
                self.post_forward(index, output)

        block.module.register_forward_pre_hook(torch_internals.not_compiled(before), prepend=True)
        block.module.register_forward_hook(torch_internals.not_compiled(after))
        for param in block.params:
            hook = torch_internals.not_compiled(_leaf_hook(weakref.ref(self), index, param))
            torch_internals.hook_leaf(param.param, hook)

    def _hook_outputs(self, index: int, output: object) -> tuple[bool, bool]:
        """Give each tensor of ``output`` that autograd made a hook; leaves would keep theirs.

        Returns:
            Whether one got a hook, and whether there was any tensor: a class may hide them.
        """
        leaves = tree_flatten(output)[0]
        tensors = _tensors(leaves) or _tensors(_attributes(leaves))
        hooked = [tensor for tensor in tensors if tensor.grad_fn is not None]
        version = self.weights_version
        for tensor in hooked:
            tensor.register_hook(lambda grad: self.pre_backward(index, version))
        return bool(hooked), bool(tensors)


def _tensors(values: list[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _attributes(objects: list[Any]) -> list[Any]:
    """What dataclasses and other objects, which pytree takes for leaves, hold."""
    found = [value for each in objects for value in getattr(each, "__dict__", {}).values()]
    return tree_flatten(found)[0]


def _leaf_hook(
    engine: weakref.ref[Engine], index: int, param: DedicatedParam
) -> Callable[[torch.Tensor], None]:
    """A hook that keeps nothing alive: the garbage collector cannot see into a leaf's hooks."""
    weak_param = weakref.ref(param)

    def hook(leaf: torch.Tensor) -> None:
        alive, owned = engine(), weak_param()
        if alive is not None and owned is not None:
            alive.on_gradient(index, owned)

    return hook
