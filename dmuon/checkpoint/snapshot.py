"""What a rank brings to a checkpoint, as it is now, while training may go on.

Weights and the optimizer's state change in ``step`` and when something is loaded, not in forward
and backward. So an asynchronous save copies them beside the next forward, and whatever is about
to change them waits for the copies first (`Dedication.settle`).
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dmuon.checkpoint.host_memory import empty
from dmuon.errors import SetupError


@dataclass(frozen=True)
class _Live:
    """A tensor in use.

    Attributes:
        value: what is read.
        dtype: that it is kept in.
        watched: it, and others through which the same memory can be written.
        versions: of those, when the checkpoint was begun.
    """

    value: torch.Tensor
    dtype: torch.dtype
    watched: Sequence[torch.Tensor]
    versions: Sequence[int]


class Snapshot:
    """Tensors of this rank by key: the live ones first, and private ones in host memory after.

    Attributes:
        values: by key; `take` puts copies in the place of live tensors.

    Args:
        device: where the live tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self._live: dict[str, _Live] = {}
        self._is_taken = threading.Event()
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream()

    def add(self, key: str, value: torch.Tensor, dtype: torch.dtype, *others: torch.Tensor) -> None:
        """Read ``value`` when it is time.

        Args:
            key: of the copy.
            value: anything that nothing but the optimizer and loading changes.
            dtype: of the copy.
            others: parameters that show the same memory, through which a user could change it. Of
                a ``DTensor`` and its shard each counts its own changes.
        """
        watched = (value, *others)
        self._live[key] = _Live(value.detach(), dtype, watched, [t._version for t in watched])

    def add_copy(self, key: str, value: torch.Tensor, dtype: torch.dtype) -> None:
        """Copy ``value`` at once: forward may change it, or it is private already."""
        self.values[key] = value.detach().to("cpu", dtype, copy=True)

    def share(self) -> None:
        """Take no copies: nothing changes meanwhile, as the caller waits."""
        for key in list(self._live):
            live = self._live.pop(key)
            is_kept = live.value.dtype == live.dtype
            self.values[key] = live.value if is_kept else live.value.to("cpu", live.dtype)
        self._is_taken.set()

    def begin(self) -> None:
        """What the device still computes for these tensors comes before they are read. Local."""
        self._stream.wait_stream(self._module.current_stream())

    def take(self) -> None:
        """Copy everything to host memory; in whatever thread, after `begin`.

        Raises:
            SetupError: a tensor was changed meanwhile by somebody who did not wait.
        """
        try:
            with self._module.stream(self._stream):
                for key in list(self._live):
                    live = self._live.pop(key)
                    self.values[key] = empty(live.value.shape, live.dtype).copy_(live.value)
                    if [t._version for t in live.watched] != list(live.versions):
                        name = key.partition(" ")[2]
                        raise SetupError(
                            f"{name} was changed while it was copied; whoever changes weights or "
                            "state by hand after an asynchronous save must call wait_copied() of "
                            "its handle first"
                        )
        finally:
            self._live.clear()
            self._is_taken.set()

    def wait(self) -> None:
        """Wait until the tensors may change. Local."""
        self._is_taken.wait()
