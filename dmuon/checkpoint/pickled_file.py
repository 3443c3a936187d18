"""Files of ``torch.save``, read without running anything in them."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmuon.checkpoint.facts import DTYPES, TensorFacts, facts_of
from dmuon.checkpoint.plain_json import is_plain
from dmuon.checkpoint.tensor_file import row_range
from dmuon.errors import CheckpointError
from dmuon.names import is_extra_state


class PickledFile:
    """A state dict that ``torch.save`` wrote: tensors by name, and plain state of modules.

    It is read without running anything in it, and mapped into memory rather than copied.

    Args:
        path: of the file.

    Raises:
        CheckpointError: it holds anything else, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            is_mappable = zipfile.is_zipfile(path)  # not so before torch 1.6
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mappable)
        except Exception as error:  # torch raises many kinds, for damage and for what is refused
            raise CheckpointError(
                path,
                "it is damaged, or holds more than tensors, which is not run; where it was made, "
                "save model.state_dict() alone, or as safetensors",
            ) from error
        self.module_state: dict[str, Any] = {}
        """What ``get_extra_state`` of modules returned beside tensors, as plain data."""
        self._tensors = self._checked(content)
        self.facts: Mapping[str, TensorFacts] = {
            name: facts_of(tensor) for name, tensor in self._tensors.items()
        }
        """Of every tensor, in the order of the file."""

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read a tensor, or some of its rows; see `TensorFile.read`."""
        tensor = self._tensors[name]
        if rows is not None:
            tensor = tensor.narrow(0, *row_range(name, self.facts[name], rows))
        return tensor.clone(memory_format=torch.contiguous_format)

    def _checked(self, content: object) -> dict[str, Tensor]:
        if not isinstance(content, dict):
            raise CheckpointError(
                self.path,
                f"it holds a {type(content).__name__}, no state dict; save model.state_dict()",
            )
        size = self.path.stat().st_size
        tensors: dict[str, Tensor] = {}
        for name, tensor in content.items():
            if _is_state_of_module(name, tensor):
                self.module_state[name] = tensor
                continue
            if not isinstance(name, str) or type(tensor) not in (Tensor, nn.Parameter):
                what = f"{name!r:.100} in it is a {type(tensor).__name__}"
                raise CheckpointError(
                    self.path,
                    f"{what}; only tensors by name can be read, and plain data of modules: save "
                    "the weights alone, as model.state_dict() has them",
                )
            if tensor.layout != torch.strided or tensor.dtype not in DTYPES.values():
                what = f"{name!r:.100} in it is {tensor.layout} {tensor.dtype}"
                raise CheckpointError(self.path, f"{what}, which cannot be read")
            if tensor.device.type != "cpu":  # meta: there are no values
                what = f"{name!r:.100} in it is on {tensor.device}"
                raise CheckpointError(self.path, f"{what}, so it has no values")
            if tensor.nbytes > size:
                raise CheckpointError(self.path, f"{name!r:.100} in it is larger than the file")
            tensors[name] = tensor.detach()
        return tensors


def _is_state_of_module(name: object, value: object) -> bool:
    is_named = isinstance(name, str) and is_extra_state(name)
    return is_named and not isinstance(value, Tensor) and is_plain(value)
