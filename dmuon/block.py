"""A block: the dedicated parameters of one module, made whole and freed together."""

from collections.abc import Collection, Sequence
from enum import Enum, auto

import torch
from torch import nn
from torch.profiler import record_function

from dmuon.carriers import Carrier
from dmuon.counters import Counters
from dmuon.parameter import DedicatedParam
from dmuon.parcel import Parcel
from dmuon.reduction import Reduction


class Weights(Enum):
    """Where the weights of a block are."""

    RESHARDED = auto()
    ARRIVING = auto()
    UNSHARDED = auto()


class Block:
    """One hook boundary; every method that communicates says so.

    Attributes:
        name: of the module, "" for the root.
        carrier: how it travels along the row.
        shown: the name and its matrices, for messages.
        in_backward: backward has entered this block and not left it; forwards seen meanwhile are
            recomputations of activation checkpointing and must not free anything.
        num_running: forwards of this block under way; more than one when it calls itself. One that
            ends by an exception is counted until `forget_forwards`, which costs memory alone.
    """

    def __init__(
        self, name: str, module: nn.Module, parcels: Sequence[Parcel], carrier: Carrier
    ) -> None:
        self.name = name
        self.module = module
        self.parcels = list(parcels)
        self.carrier = carrier
        self.params: list[DedicatedParam] = [p for parcel in parcels for p in parcel.params]
        self.shown = _shown(name, self.params)
        self.in_backward = False
        self.num_running = 0
        self.waiting_for = self._trainable()
        self._weights = Weights.RESHARDED
        self._version = -1

    def start_unshard(self, version: int, counters: Counters) -> bool:
        """Begin to make the weights of ``version`` whole on every rank.

        Collective over each row of the mesh; does nothing when they are there or on their way.

        Returns:
            Whether anything was begun.
        """
        if self._weights is not Weights.RESHARDED:
            if self._version == version:
                return False
            self.reshard()
        with record_function(f"dmuon::unshard {self.name}"):
            self.drain()
            self.carrier.start_unshard(counters)
        self._weights, self._version = Weights.ARRIVING, version
        return True

    def finish_unshard(self) -> None:
        """Wait for the weights and show them; does nothing when they are shown."""
        if self._weights is Weights.ARRIVING:
            with record_function(f"dmuon::wait_unshard {self.name}"):
                self.carrier.finish_unshard()
            self._weights = Weights.UNSHARDED

    def drain(self) -> None:
        """Wait for the weights that are being published to this rank. Local."""
        if any(parcel.is_publishing for parcel in self.parcels):
            with record_function(f"dmuon::wait_publish {self.name}"):
                for parcel in self.parcels:
                    parcel.drain()

    def publish(self, counters: Counters) -> None:
        """Send the new weights of the owners to the other replicas; asynchronous.

        Collective over the columns of a grid.
        """
        for parcel in self.parcels:
            parcel.update_wire()
        if any(parcel.route.publish for parcel in self.parcels):
            with record_function(f"dmuon::publish {self.name}"):
                for parcel in self.parcels:
                    parcel.start_publish(counters)

    def reshard(self) -> None:
        """Free the weights of other owners; does nothing when they are freed. Local."""
        self.finish_unshard()
        if self._weights is Weights.UNSHARDED:
            self.carrier.reshard()
            self._weights = Weights.RESHARDED

    @property
    def is_resharded(self) -> bool:
        """Whether other owners' weights are freed here and not on their way."""
        return self._weights is Weights.RESHARDED

    @property
    def is_frozen_in_part(self) -> bool:
        """Whether some matrix takes no gradient, so that arrivals do not tell when we are done."""
        return any(not param.param.requires_grad for param in self.params)

    def note_gradient(self, param: DedicatedParam) -> bool:
        """Note that autograd is done with ``param``; True when it was the last one awaited."""
        if param not in self.waiting_for:
            return False
        self.waiting_for.discard(param)
        return not self.waiting_for

    def reset_arrivals(self) -> None:
        """Await the gradients of all that is trainable now; done between backwards."""
        self.waiting_for = self._trainable()
        self.in_backward = False

    def start_reduction(
        self, dtype: torch.dtype | None, counters: Counters
    ) -> tuple[Reduction, Collection[DedicatedParam]]:
        """Take the local gradients and begin to bring them to their owners.

        Collective over each row of the mesh; a missing gradient travels as zeros.

        Returns:
            The reduction, and the parameters that have a gradient on this rank.
        """
        with record_function(f"dmuon::reduce {self.name}"):
            counters.reductions += 1
            return self.carrier.start_reduction(dtype or self._common_dtype(), counters)

    def _common_dtype(self) -> torch.dtype:
        dtypes = {parcel.dtype for parcel in self.parcels}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def _trainable(self) -> set[DedicatedParam]:
        return {param for param in self.params if param.param.requires_grad}


def _shown(name: str, params: Sequence[DedicatedParam]) -> str:
    names = ", ".join(f"{param.name} of owner {param.owner}" for param in params[:3])
    rest = f" and {len(params) - 3} more" if len(params) > 3 else ""
    return f"{name or 'the model'} ({names}{rest})"
