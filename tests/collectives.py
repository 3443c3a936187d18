"""What collectives move, counted at torch's own dispatcher."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Collectives(TorchDispatchMode):
    """Bytes of the tensors of every collective that anybody starts in this thread, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2].strip("_")
            # of the all-to-all, (received, sent, ...), what is sent
            given = args[1] if name.startswith("alltoall") else args[0]
            tensors = [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]
            self.bytes[name] += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))
