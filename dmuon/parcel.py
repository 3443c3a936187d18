"""What one owner sends together: its matrices of one block, back to back in one buffer.

Glossary. *master*: the float32 weights, on the owner alone. *wire*: the weights in the compute
dtype; whole on a source for ever, elsewhere only between unshard and reshard. Where the compute
dtype is float32 the owner's wire is its master, so nothing is copied or kept twice.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from dmuon.counters import Counters
from dmuon.owner_map import Leg, Route
from dmuon.parameter import DedicatedParam

MASTER_DTYPE = torch.float32


class Parcel:
    """The matrices of one owner in one block; all their collectives move one flat buffer."""

    def __init__(
        self,
        owner: int,
        params: Sequence[DedicatedParam],
        route: Route,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.owner = owner
        self.params = list(params)
        self.route = route
        self.dtype = dtype
        self.device = device
        ends = list(accumulate(param.numel for param in params))
        self._spans = dict(zip(params, pairwise([0, *ends]), strict=True))
        self.numel = ends[-1]
        self.master: torch.Tensor | None = None
        self._wire: torch.Tensor | None = None
        self._shown: tuple[torch.Tensor, list[torch.Tensor]] | None = None  # a wire, its views
        self._arriving: dist.Work | None = None
        self._publishing: list[dist.Work] = []

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """One view into ``flat`` a parameter, each of its full shape."""
        pieces = flat[: self.numel].split([param.numel for param in self.params])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.params, strict=True)]

    def view(self, flat: torch.Tensor, param: DedicatedParam) -> torch.Tensor:
        """The one of `views` that is of ``param``."""
        begin, end = self._spans[param]
        return flat[begin:end].view(param.shape)

    @property
    def numel_with_flags(self) -> int:
        """Elements of its gradients and of the flags that travel with them, one a parameter."""
        return self.numel + len(self.params)

    def adopt(self, values: Sequence[torch.Tensor]) -> None:
        """Take ``values`` as the weights this rank keeps; a rank that keeps none drops them.

        Collective over each column of a grid: all rows start with the values of the first row.
        """
        if self.route.is_source:
            flat = self._filled(values)
            for leg in self.route.start:
                if leg.size > 1:
                    dist.broadcast(flat, group=leg.group, group_src=leg.root)
            self.master = flat if self.route.is_owner else None
            is_wire_too = self.route.is_owner and self.dtype == MASTER_DTYPE
            self._wire = None if is_wire_too else flat.to(self.dtype, copy=True)
        self.hide()

    def hide(self) -> None:
        """Show NaN where this rank keeps no values; sources show their own copy."""
        if self.route.is_source:
            self._show(self.source_wire())
        else:
            for param in self.params:
                param.hide(self.dtype, self.device)

    def arrive_in(self, wire: torch.Tensor) -> None:
        """Show, from the next unshard on, what somebody else receives in ``wire``."""
        self._wire = wire

    def start_unshard(self, counters: Counters) -> None:
        """Begin to make the weights whole here. Collective over the row; asynchronous."""
        leg = self.route.unshard
        wire = self.source_wire() if leg.is_root else self._arrival_wire()
        if leg.size > 1:
            counters.count("broadcast", wire.nbytes)
            self._arriving = dist.broadcast(
                wire, group=leg.group, group_src=leg.root, async_op=True
            )

    def finish_unshard(self) -> None:
        """Wait for what ``start_unshard`` began, then show the weights."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        self._show(self.source_wire() if self.route.unshard.is_root else self._arrived_wire())

    def reshard(self) -> None:
        """Free what belongs to others; autograd's views of it are filled again by an unshard."""
        if not self.route.unshard.is_root:
            self._arrived_wire().untyped_storage().resize_(0)
        self.hide()

    def update_wire(self) -> None:
        """After the master changed: bring the owner's own wire up to date."""
        if self.master is not None and self._wire is not None:
            self._wire.copy_(self.master)

    def start_publish(self, counters: Counters) -> None:
        """Send the owner's weights to the other sources. Collective over each publish leg."""
        for leg in self.route.publish:
            if leg.size > 1:
                wire = self.source_wire()
                counters.count("publish", wire.nbytes)
                work = dist.broadcast(wire, group=leg.group, group_src=leg.root, async_op=True)
                self._publishing.append(work)

    @property
    def is_publishing(self) -> bool:
        """Whether a publish was started that nobody has waited for."""
        return bool(self._publishing)

    def drain(self) -> None:
        """Wait for what is being published. Local: the works were started on all ranks."""
        for work in self._publishing:
            work.wait()
        self._publishing.clear()

    def gather_full(self, values: torch.Tensor | None) -> torch.Tensor:
        """The owner's flat float32 ``values``, on every rank. Collective over the whole mesh.

        Args:
            values: the flat buffer on the owner (master, momentum), ignored elsewhere.
        """
        flat = torch.empty(self.numel, dtype=MASTER_DTYPE, device=self.device)
        if self.route.is_owner:
            assert values is not None
            flat.copy_(values)
        legs: list[Leg] = [*self.route.publish, self.route.unshard]
        for leg in legs:
            if leg.size > 1:
                dist.broadcast(flat, group=leg.group, group_src=leg.root)
        return flat

    def source_wire(self) -> torch.Tensor:
        """The copy that a source keeps, flat."""
        wire = self.master if self._wire is None else self._wire
        assert wire is not None
        return wire

    def _filled(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        flat = torch.empty(self.numel, dtype=MASTER_DTYPE, device=self.device)
        for view, value in zip(self.views(flat), values, strict=True):
            view.copy_(value)
        return flat

    def _arrival_wire(self) -> torch.Tensor:
        if self._wire is None:
            self._wire = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        self._wire.untyped_storage().resize_(self.numel * self._wire.itemsize)
        return self._wire

    def _arrived_wire(self) -> torch.Tensor:
        assert self._wire is not None
        return self._wire

    def _show(self, wire: torch.Tensor) -> None:
        if self._shown is None or self._shown[0] is not wire:
            self._shown = wire, self.views(wire)
        for param, view in zip(self.params, self._shown[1], strict=True):
            param.param.data = view
