"""Plain Python values as JSON and back: what comes out has the types of what went in.

JSON has no tuples, types of numbers, infinities or keys other than text. They are written as a
dict with one key that begins with ``$``, such as ``{"$tuple": [0.9, 0.95]}``.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

_TUPLE = "$tuple"
_FLOAT = "$float"
_DTYPE = "$dtype"
_SCALAR = "$scalar"
_DICT = "$dict"


def encode(value: Any, path: str = "") -> Any:
    """Turn plain Python values into what `decode` turns back.

    Args:
        value: dicts, lists, tuples, text, numbers, bools, None, ``torch.dtype`` and tensors without
            dimensions, in each other.
        path: of the value in what it is part of, for errors.

    Raises:
        TypeError: it is, or has in it, anything else.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, (list, tuple, Mapping)):
        return _encode_container(value, path)
    return _encode_torch(value, path)


def _encode_container(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return _encode_dict(value, path)
    items = [encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
    return {_TUPLE: items} if isinstance(value, tuple) else items


def _encode_dict(value: Mapping[Any, Any], path: str) -> Any:
    items = {key: encode(item, f"{path}[{key!r}]") for key, item in value.items()}
    if all(isinstance(key, str) and not key.startswith("$") for key in items):
        return items
    return {_DICT: [[encode(key, f"a key of {path}"), item] for key, item in items.items()]}


def _encode_torch(value: Any, path: str) -> Any:
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return {_SCALAR: [encode(value.item()), encode(value.dtype)]}
    what = f"{path.lstrip('.')} is a {type(value).__name__}" if path else f"{value!r:.100}"
    raise TypeError(f"{what}: not plain data (dict, list, tuple, text, number, bool, None, dtype)")


def is_plain(value: Any) -> bool:
    """Whether `encode` takes it; also of what has one part in many places, or in itself."""
    seen: set[int] = set()
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, list | tuple | dict):
            if id(item) not in seen:
                seen.add(id(item))
                left += [*item, *item.values()] if isinstance(item, dict) else item
        elif isinstance(item, torch.Tensor):
            if item.ndim > 0 or item.is_meta:
                return False
        elif item is not None and not isinstance(item, bool | int | float | str | torch.dtype):
            return False
    return True


def decode(value: Any) -> Any:
    """Undo `encode`.

    Raises:
        ValueError: `encode` has not made it.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next((key for key in value if key.startswith("$")), None)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    try:
        (content,) = value.values()
        return _DECODERS[kind](content)
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{value!r:.100} is no value that was written here") from error


def _decode_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(name)
    return dtype


def _decode_scalar(content: list[Any]) -> torch.Tensor:
    value, dtype = (decode(item) for item in content)
    if not isinstance(value, (bool, int, float)):
        raise TypeError(value)
    return torch.tensor(value, dtype=dtype)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    _TUPLE: lambda items: tuple(decode(item) for item in items),
    _FLOAT: float,
    _DTYPE: _decode_dtype,
    _SCALAR: _decode_scalar,
    _DICT: lambda pairs: {decode(key): decode(item) for key, item in pairs},
}


def parse(text: str | bytes) -> Any:
    """Read JSON that may be anybody's.

    Raises:
        ValueError: it is none, says a key twice, has numbers that JSON does not know, or is nested
            too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {twice!r:.100} twice")
    return content


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")
