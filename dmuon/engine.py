"""When what happens: forward and backward, prefetch, and the fixed order of reductions.

Every decision here depends on the module tree and on how often a hook fired, which is the same on
all ranks, and never on values. Reductions start in descending order of the blocks, each as soon as
it and all blocks after it have their gradients; a rank that lacks a gradient sends zeros at the
end of backward, in the same order.
"""

import weakref
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule

from dmuon import hooks, torch_internals
from dmuon.block import Block
from dmuon.call_order import Call, CallOrder
from dmuon.counters import Counters
from dmuon.errors import OwnershipError
from dmuon.ledger import GradientLedger
from dmuon.parameter import DedicatedParam
from dmuon.scaling_watch import ScalingWatch


@dataclass(frozen=True)
class Conduct:
    """What the user decided once, at ``dedicate_params``.

    Attributes:
        reduce_dtype: in which gradients travel; None: that of the weights on the wire.
        reshard_after_forward: free weights between forward and backward, but for the last block.
        can_recover: whether training may go on after a backward that raised.
    """

    reduce_dtype: torch.dtype | None
    reshard_after_forward: bool
    can_recover: Callable[[], bool]


class Engine:
    """Drives the blocks of one model through forward, backward and step.

    Attributes:
        sync_gradients: whether the next backward sends its gradients to the owners.
        has_unsent: a backward under ``no_sync`` has left gradients that no other has sent yet.
        num_zeroed: how often gradients were dropped.
        scaling_watch: told when gradients are as they should be.
    """

    def __init__(
        self,
        blocks: list[Block],
        ledger: GradientLedger,
        order: CallOrder,
        counters: Counters,
        conduct: Conduct,
    ) -> None:
        self.blocks = blocks
        self.ledger = ledger
        self.order = order
        self.counters = counters
        self.weights_version = 0
        self.sync_gradients = True
        self.has_unsent = False
        self.num_zeroed = 0
        self.scaling_watch = ScalingWatch()
        self._conduct = conduct
        self._has_gradients = False
        self._next_to_reduce = len(blocks) - 1
        self._ready: set[int] = set()
        self._recomputed: list[Block] = []  # in a backward of reentrant checkpointing
        self._sent_by_fsdp: set[Block] = set()  # in such a backward that is over
        self._backward_id = -1
        self._backward_end: weakref.ref[Callable[[], None]] | None = None  # while one runs
        for index, block in enumerate(blocks):
            hooks.install(self, index, block)

    # Weights ------------------------------------------------------------------------------

    def enter_model(self) -> None:
        """At the start of the outermost forward: compare what the ranks are doing.

        Collective over the mesh, asynchronous.
        """
        if not torch_internals.in_backward():
            self._recover_from_failed_backward()
            self.order.begin(Call.FORWARD if torch.is_grad_enabled() else Call.EVALUATION)

    def leave_model(self, output: object) -> None:
        """At its end: make sure that backward is noticed where it enters the model. Local.

        Under reentrant checkpointing blocks give out nothing that autograd would see before the
        backwards that run inside the one we have to know.
        """
        if torch.is_grad_enabled() and not torch_internals.in_backward():
            version = self.weights_version
            hooks.watch(output, lambda: self._check_and_enter_backward("the model", version))

    def pre_forward(self, index: int) -> None:
        """Show the block's weights and send for the next block's. Collective over the row."""
        block = self.blocks[index]
        if torch_internals.in_backward():
            # activation checkpointing: the weights stay until the gradients of the block are in
            self._check_recomputed_once(index)
            block.in_backward = True
            self._unshard(index)
            if self._conduct.reshard_after_forward:
                self._prefetch(index - 1)
            return
        self._recover_from_failed_backward()
        block.num_running += 1
        self._unshard(index)
        self._prefetch(index + 1)

    def post_forward(self, index: int, output: object) -> None:
        """Free the block's weights, if that is worth it, and see that backward has them. Local."""
        block = self.blocks[index]
        if torch_internals.in_backward():
            return
        block.num_running = max(0, block.num_running - 1)
        if not torch.is_grad_enabled():
            self._reshard_unless_running(block)
            return
        watched = self._watch(index, output)
        if not watched.has_tensor:  # nothing will bring the weights back, so they stay
            return
        is_last = index == len(self.blocks) - 1  # backward begins with it, so it stays whole
        if (self._conduct.reshard_after_forward and not is_last) or not watched.has_hook:
            self._reshard_unless_running(block)

    def post_use(self, index: int, output: object) -> None:
        """Watch what a module inside the block gives out, for it may leave the block unseen."""
        if not torch_internals.in_backward():
            self._watch(index, output)

    def pre_backward(self, index: int, version: int) -> None:
        """Show the block's weights and send for the previous block's. Collective over the row.

        Raises:
            OwnershipError: for a backward that would compute with other weights than the forward,
                which used those of ``version``, or that would itself be differentiated.
        """
        block = self.blocks[index]
        self._check_and_enter_backward(block.name or "the model", version)
        if block.in_backward:
            return
        block.in_backward = True
        self._unshard(index)
        if self._conduct.reshard_after_forward:
            self._prefetch(index - 1)

    def settle_weights(self) -> None:
        """Wait for weights on their way: to be arrived here or published. Local."""
        for block in self.blocks:
            with self.order.explained(f"waiting for the weights of {block.shown}"):
                block.finish_unshard()
                block.drain()

    def publish(self, *, wait: bool) -> None:
        """After the owners changed weights: make every other copy stale, send the new ones.

        Collective over the columns of a grid; sends nothing on a 1D mesh.
        """
        self.weights_version += 1
        self._forget_forwards()
        for block in self.blocks:
            with self.order.explained(f"publishing the new weights of {block.shown}"):
                block.publish(self.counters)
                if wait:
                    block.drain()

    def _watch(self, index: int, output: object) -> hooks.Watched:
        version = self.weights_version
        return hooks.watch(output, lambda: self.pre_backward(index, version))

    @staticmethod
    def _reshard_unless_running(block: Block) -> None:
        """A block may call itself, and a forward may run a backward: the outer call goes on."""
        if not block.num_running:
            block.reshard()

    def _unshard(self, index: int) -> None:
        block = self.blocks[index]
        self._start_unshard(index)
        with self.order.explained(f"waiting for the weights of {block.shown}"):
            block.finish_unshard()

    def _prefetch(self, index: int) -> None:
        if 0 <= index < len(self.blocks):
            self._start_unshard(index)

    def _start_unshard(self, index: int) -> None:
        block = self.blocks[index]
        with self.order.explained(f"sending for the weights of {block.shown}"):
            if block.start_unshard(self.weights_version, self.counters):
                self.order.note_collective(b"unshard by " + block.carrier.packing.encode(), index)

    # Gradients ----------------------------------------------------------------------------

    def on_gradient(self, index: int, param: DedicatedParam) -> None:
        """Autograd is done with one leaf. Starts collectives over the row when it was the last.

        Raises:
            OwnershipError: for a gradient that comes after those of its block were sent, or that
                was computed without the weights of its block.
        """
        self._enter_backward()
        block = self.blocks[index]
        if not self.sync_gradients and self._conduct.reduce_dtype is not None:
            param.hold_gradient(self._conduct.reduce_dtype)
        self._check_gradient(index, param)
        if torch_internals.backward_id() != self._backward_id:
            self._note_recomputed(block)
            return
        if not block.note_gradient(param):
            return
        if not block.is_frozen_in_part:
            block.in_backward = False
            block.reshard()
        if self.sync_gradients:
            self._ready.add(index)
            while self._next_to_reduce in self._ready:
                self._reduce_next()

    def _check_gradient(self, index: int, param: DedicatedParam) -> None:
        block = self.blocks[index]
        if self.sync_gradients and index > self._next_to_reduce:
            raise OwnershipError(
                f"{param.name} got a second gradient in one backward, after the first was sent to "
                "its owner: it is used both inside and outside of a checkpoint with "
                "use_reentrant=True; use checkpoint(..., use_reentrant=False)"
            )
        if block.is_resharded:
            raise OwnershipError(
                f"backward reached {param.name} through a tensor that left "
                f"{block.name or 'the model'} beside what it returns (kept on a module, put into a "
                "list), where nothing brings the weights back; return it, or compute it in a "
                "module of its own inside the block"
            )

    def settle_gradients(self) -> None:
        """Wait until the owners have all gradients. Collective on a grid.

        Raises:
            OwnershipError: when gradients accumulated under ``no_sync`` were never sent.
            CollectiveError: when the ranks have not made the same calls until here.
        """
        if self.has_unsent:
            raise OwnershipError(
                "gradients accumulated under dmuon.no_sync(model) have not been sent to the "
                "owners; run the last backward before a step outside of it, or zero_grad()"
            )
        self.order.check()
        self.ledger.settle()

    def zero_grad(self) -> None:
        """Forget all gradients, local and reduced. Collective on a grid."""
        if self._has_gradients:
            self.order.note(Call.ZERO_GRAD)
        self._has_gradients = self.has_unsent = False
        self.num_zeroed += 1
        self._forget_forwards()
        self.ledger.drop()
        for block in self.blocks:
            for param in block.params:
                param.drop_gradient()

    def discard_gradients(self, params: Collection[DedicatedParam]) -> None:
        """Forget the gradients of some parameters. Collective on a grid."""
        self.ledger.discard(params)
        for param in params:
            param.drop_gradient()

    def _reduce_next(self) -> None:
        index = self._next_to_reduce
        block = self.blocks[index]
        self._next_to_reduce -= 1
        self.order.note_collective(b"reduce by " + block.carrier.packing.encode(), index)
        with self.order.explained(f"sending the gradients of {block.shown}"):
            reduction, had_gradient = block.start_reduction(
                self._conduct.reduce_dtype, self.counters
            )
        self.ledger.add(reduction, had_gradient, block.name or "the model")

    def _check_and_enter_backward(self, what: str, version: int) -> None:
        if version != self.weights_version:
            raise OwnershipError(
                f"the weights of {what} changed between forward and backward (a step or a loaded "
                "state dict); run the forward again"
            )
        if torch.is_grad_enabled():
            raise OwnershipError(
                "a backward with create_graph=True would need weights after they are freed; "
                "second derivatives are not supported for dedicated parameters"
            )
        self._enter_backward()

    def _enter_backward(self) -> None:
        self._recover_from_failed_backward()
        if self._backward_end is not None:
            return
        call = Call.BACKWARD if self.sync_gradients else Call.BACKWARD_NO_SYNC
        self.order.begin(call, self._expected_gradients())
        self._has_gradients = True
        self._backward_id = torch_internals.backward_id()
        for block in self.blocks:
            block.reset_arrivals()

        def end() -> None:
            self._leave_backward()

        self._backward_end = weakref.ref(end)
        torch_internals.call_after_backward(end)

    def _expected_gradients(self) -> int:
        """A digest of which matrices the backward that begins will reach on this rank. Local."""
        if not self.ledger.waits_in_backward:
            return 0
        params = [param.param for block in self.blocks for param in block.params]
        return zlib.crc32(bytes(map(torch_internals.will_reach, params)))

    def _leave_backward(self) -> None:
        self.has_unsent = not self.sync_gradients
        while self.sync_gradients and self._next_to_reduce >= 0:
            self._reduce_next()
        self._reset_backward()
        # fully_shard's own end of backward was queued before, and runs before this
        torch_internals.call_after_backward(self.scaling_watch.note)

    def _note_recomputed(self, block: Block) -> None:
        """A gradient from inside a reentrant checkpoint; more may come, so it is sent last."""
        if not self._recomputed:
            torch_internals.call_after_backward(self._leave_recomputed)
        self._recomputed.append(block)

    def _check_recomputed_once(self, index: int) -> None:
        """Refuse what would be wrong in silence for the parameters that ``fully_shard`` holds.

        It sends them once a reentrant checkpoint, and loses the gradients of all but one.
        """
        block = self.blocks[index]
        if block in self._sent_by_fsdp and isinstance(block.module, FSDPModule):
            raise OwnershipError(
                f"{block.name} runs twice in one forward under checkpoint(..., use_reentrant=True);"
                " fully_shard would lose gradients of it. Use use_reentrant=False"
            )

    def _leave_recomputed(self) -> None:
        for block in self._recomputed:
            block.in_backward = False
            block.reshard()
        self._sent_by_fsdp.update(self._recomputed)
        self._recomputed.clear()

    def _forget_forwards(self) -> None:
        for block in self.blocks:
            block.num_running = 0

    def _reset_backward(self) -> None:
        for block in self.blocks:
            self._reshard_unless_running(block)
            block.reset_arrivals()
        self._ready.clear()
        self._recomputed.clear()
        self._sent_by_fsdp.clear()
        self._next_to_reduce = len(self.blocks) - 1
        self._backward_end = None

    def _recover_from_failed_backward(self) -> None:
        """Start afresh when autograd has dropped the end of the last backward without calling it.

        Raises:
            OwnershipError: beside ``fully_shard``, which would go on with wrong gradients.
        """
        if self._backward_end is None or self._backward_end() is not None:
            return
        if not self._conduct.can_recover():
            raise OwnershipError(
                "a backward ended with an exception; fully_shard cannot continue after that "
                "without wrong gradients. Build the model again and load the last checkpoint"
            )
        self._reset_backward()
