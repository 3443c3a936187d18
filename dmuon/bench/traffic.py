"""Bytes on the way between ranks: handed to collectives, and really sent by the kernel."""

import os
import socket
import stat
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_KINDS = {  # operators of torch.distributed and of its functional form, by what they do
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
}
_NO_PAYLOAD = ("barrier", "monitored_barrier_", "wait_tensor")


class Payload(TorchDispatchMode):
    """Counts what this rank hands to collectives, as torch calls them.

    Of each collective the larger of what goes in and what comes out: the whole tensor, also of an
    all-gather. Every operator costs the host more while this is on, so nothing is timed under it.

    Attributes:
        bytes: by kind of collective.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``; a ``DTensor`` goes first, for its collectives to come here."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):  # type: ignore[attr-defined]
            name = func._schema.name.partition("::")[2]  # type: ignore[attr-defined]
            if name not in _NO_PAYLOAD:
                sides = (*args, *kwargs.values(), result)
                size = max(sum(each.nbytes for each in _tensors(side)) for side in sides)
                kind = _KINDS.get(name, name.strip("_"))
                self.bytes[kind] += size
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


# struct tcp_info of Linux, include/uapi/linux/tcp.h
_TCP_INFO_SIZE = 256
_BYTES_SENT_OFFSET = 200


def sent_bytes() -> int | None:
    """What the kernel has sent on the TCP sockets of this process, in bytes without headers.

    None where it does not tell (it does on Linux); only gloo sends everything on such sockets.
    """
    tcp_info = getattr(socket, "TCP_INFO", None)
    if tcp_info is None or not os.path.isdir("/proc/self/fd"):
        return None
    total = 0
    for connection in _connections():
        with connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, tcp_info, _TCP_INFO_SIZE)
            if len(info) < _BYTES_SENT_OFFSET + 8:
                return None
            total += struct.unpack_from("=Q", info, _BYTES_SENT_OFFSET)[0]
    return total


def _connections() -> Iterator[socket.socket]:
    """A second handle on each TCP socket of this process, for the caller to close."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since the list was made
            continue
        is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
        if is_internet and connection.type == socket.SOCK_STREAM:
            yield connection
        else:
            connection.close()
