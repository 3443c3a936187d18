"""When what happens: forward and backward hooks, prefetch, and the fixed order of reductions.

Every decision here depends on the module tree and on how often a hook fired, which is the same on
all ranks, and never on values. Reductions start in descending order of the blocks, each as soon as
it and all blocks after it have their gradients; a rank that lacks a gradient sends zeros at the
end of backward, in the same order.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from dmuon import torch_internals
from dmuon.block import Block
from dmuon.counters import Counters
from dmuon.ledger import GradientLedger
from dmuon.parameter import DedicatedParam
from dmuon.reduction import StartReduction


class Engine:
    """Drives the blocks of one model through forward, backward and step."""

    def __init__(
        self,
        blocks: list[Block],
        ledger: GradientLedger,
        start_reduction: StartReduction,
        reduce_dtype: torch.dtype | None,
        reshard_after_forward: bool,
    ) -> None:
        self.blocks = blocks
        self.ledger = ledger
        self.counters = Counters()
        self.weights_version = 0
        self.sync_gradients = True
        self._start_reduction = start_reduction
        self._reduce_dtype = reduce_dtype
        self._reshard_after_forward = reshard_after_forward
        self._next_to_reduce = len(blocks) - 1
        self._ready: set[int] = set()
        self._backward_is_running = False
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
        wants_backward = torch.is_grad_enabled() and self._hook_outputs(index, output)
        if self._reshard_after_forward or not wants_backward:
            block.reshard()

    def pre_backward(self, index: int) -> None:
        """Show the block's weights and send for the previous block's. Collective over the row."""
        self._enter_backward()
        block = self.blocks[index]
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

    def zero_grad(self) -> None:
        """Forget all gradients, local and reduced. Collective on a grid."""
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
        if not self._backward_is_running:
            self._backward_is_running = True
            torch_internals.call_after_backward(self._leave_backward)

    def _leave_backward(self) -> None:
        while self.sync_gradients and self._next_to_reduce >= 0:
            self._reduce_next()
        self._reset_backward()

    def _reset_backward(self) -> None:
        for block in self.blocks:
            block.reshard()
            block.reset_arrivals()
        self._ready.clear()
        self._next_to_reduce = len(self.blocks) - 1
        self._backward_is_running = False

    def _recover_from_failed_backward(self) -> None:
        if self._backward_is_running and not torch_internals.in_backward():
            self._reset_backward()

    # Hooks --------------------------------------------------------------------------------

    def _register(self, index: int, block: Block) -> None:
        def before(module: nn.Module, args: Any) -> None:
            self.pre_forward(index)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self.post_forward(index, output)

        block.module.register_forward_pre_hook(torch_internals.not_compiled(before), prepend=True)
        block.module.register_forward_hook(torch_internals.not_compiled(after))
        for param in block.params:
            if param.param.requires_grad:
                hook = torch_internals.not_compiled(self._leaf_hook(index, param))
                param.param.register_post_accumulate_grad_hook(hook)

    def _leaf_hook(self, index: int, param: DedicatedParam) -> Callable[[torch.Tensor], None]:
        return lambda leaf: self.on_gradient(index, param)

    def _hook_outputs(self, index: int, output: object) -> bool:
        """Whether some tensor of ``output`` takes part in autograd; each of them gets a hook."""
        tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]
        tensors = [tensor for tensor in tensors if tensor.requires_grad]
        for tensor in tensors:
            tensor.register_hook(lambda grad: self.pre_backward(index))
        return bool(tensors)
