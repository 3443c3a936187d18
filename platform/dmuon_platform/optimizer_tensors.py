"""An optimizer state dict as named tensors and a plain tree that refers to them, and back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

TENSOR = "$tensor"
SCALAR = "$scalar"
TUPLE = "$tuple"


def split(state_dict: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take the tensors out of an optimizer state dict.

    ``state_dict["fsdp2"]["model.norm.weight"]["exp_avg"]`` becomes the tensor
    ``exp_avg/model.norm.weight``. Tensors without dimensions, such as step counters, stay in the
    tree, exactly.

    Returns:
        The tensors by name, and a tree that ``json`` keeps exactly.

    Raises:
        TypeError: Something is neither a tensor nor plain data.
        ValueError: Two tensors would have the same name.
    """
    tensors: dict[str, Tensor] = {}
    tree = _split(dict(state_dict), (), tensors)
    return tensors, tree


def join(tensors: Mapping[str, Tensor], tree: Any) -> Any:
    """Undo `split`.

    Raises:
        KeyError: The tree refers to a tensor that is not there.
    """
    if isinstance(tree, list):
        return [join(tensors, item) for item in tree]
    return _join_dict(tensors, tree) if isinstance(tree, dict) else tree


def _join_dict(tensors: Mapping[str, Tensor], tree: Mapping[str, Any]) -> Any:
    if TENSOR in tree:
        return tensors[tree[TENSOR]]
    if SCALAR in tree:
        value, dtype = tree[SCALAR]
        return torch.tensor(value, dtype=getattr(torch, dtype))
    if TUPLE in tree:
        return tuple(join(tensors, item) for item in tree[TUPLE])
    return {key: join(tensors, value) for key, value in tree.items()}


def _split(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return _split_tensor(value, path, tensors)
    if isinstance(value, Mapping):
        return {str(key): _split(item, (*path, str(key)), tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_split(item, (*path, str(i)), tensors) for i, item in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{'.'.join(path)} is a {type(value).__name__}: not a tensor or plain data")


def _split_tensor(value: Tensor, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if value.ndim == 0:
        return {SCALAR: [value.item(), str(value.dtype).removeprefix("torch.")]}
    _, *owner, part = path if len(path) > 1 else ("", *path)
    name = "/".join([part, *owner])
    if name in tensors:
        raise ValueError(f"two sections of the optimizer state have a tensor {name}")
    tensors[name] = value
    return {TENSOR: name}
