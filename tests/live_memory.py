"""Bytes of live tensors by what made them: counted at torch's dispatcher, from no formula."""

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OURS = ("/dmuon/", "/torch/distributed/fsdp/")  # the code that moves weights and gradients


class LiveMemory(TorchDispatchMode):
    """Follows every storage that is made or seen within; storages of one process.

    Attributes:
        moments: after each operation, the bytes of each live storage of interest, by its number:
            those made by ``OURS``, and those given to ``watch``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[dict[int, int]] = []
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = (
            weakref.WeakKeyDictionary()
        )
        self._next = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = {t.untyped_storage()._cdata for t in given if not is_outer(t)}
        out = func(*args, **(kwargs or {}))
        if called_by(OURS):
            made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and not is_outer(t)]
            self.watch(t for t in made if t.untyped_storage()._cdata not in known)
        self.look()
        return out

    def watch(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Follow the storages of these too; their numbers."""
        return {self._number(tensor.untyped_storage()) for tensor in tensors}

    def look(self) -> None:
        sizes = {}
        for number, reference in list(self._live.items()):
            storage = reference()
            if storage is None:
                del self._live[number]
            elif storage.nbytes():
                sizes[number] = storage.nbytes()
        self.moments.append(sizes)

    def peak(self, without: set[int]) -> int:
        """The most bytes at one moment, of all but some storages."""
        return max(
            sum(size for number, size in moment.items() if number not in without)
            for moment in self.moments
        )

    def bytes_of(self, numbers: set[int]) -> int:
        """What these storages take now."""
        storages = [self._live[number]() for number in numbers]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def _number(self, storage: torch.UntypedStorage) -> int:
        if storage not in self._numbers:
            self._numbers[storage] = self._next
            self._live[self._next] = weakref.ref(storage)
            self._next += 1
        return self._numbers[storage]


def is_outer(tensor: torch.Tensor) -> bool:
    """A DTensor: what it holds is seen by itself."""
    return isinstance(tensor, DTensor)


def called_by(folders: tuple[str, ...]) -> bool:
    """Whether some function on the stack, outside of tests, lies in one of the folders."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if any(folder in file for folder in folders) and "/tests/" not in file:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
