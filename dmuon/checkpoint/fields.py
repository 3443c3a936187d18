"""Fields of JSON that may be anybody's: of the right type, or a ValueError that names them."""

import math
import re
from collections.abc import Mapping
from typing import Any

from dmuon.checkpoint.facts import TensorFacts

_LARGEST = 2**63 - 1


def mapping(value: Any, what: str) -> dict[str, Any]:
    """``value``, which must be a dict by text."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{what} is not an object with names: {value!r:.100}")
    return value


def mapping_at(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A dict."""
    return mapping(content.get(key), f"{key!r:.100}")


def mappings_at(content: Mapping[str, Any], key: str) -> dict[str, dict[str, Any]]:
    """A dict of dicts."""
    return {
        name: mapping(value, f"{name!r:.100}") for name, value in mapping_at(content, key).items()
    }


def texts_at(content: Mapping[str, Any], key: str) -> dict[str, str]:
    """A dict of texts."""
    inner = mapping_at(content, key)
    return {name: text_at(inner, name) for name in inner}


def counts_at(content: Mapping[str, Any], key: str) -> dict[str, int]:
    """A dict of counts."""
    inner = mapping_at(content, key)
    return {name: count_at(inner, name) for name in inner}


def text_at(content: Mapping[str, Any], key: str) -> str:
    """A text."""
    value = content.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key!r:.100} is no text: {value!r:.100}")
    return value


def sha256_at(content: Mapping[str, Any], key: str) -> str:
    """A SHA-256 in hexadecimal."""
    value = text_at(content, key)
    if not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError(f"{key!r:.100} is no SHA-256: {value!r:.100}")
    return value


def count_at(content: Mapping[str, Any], key: str) -> int:
    """An integer from 0 to what fits into 63 bits."""
    return _count(content.get(key), key)


def number_at(content: Mapping[str, Any], key: str) -> int | float:
    """A number."""
    value = content.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{key!r:.100} is no number: {value!r:.100}")
    return value


def tensor_facts_at(content: Mapping[str, Any], key: str) -> TensorFacts:
    """Type and shape of a tensor."""
    inner = mapping_at(content, key)
    try:
        return TensorFacts(text_at(inner, "dtype"), count_list_at(inner, "shape"))
    except ValueError as error:
        raise ValueError(f"{key!r:.100}: {error}") from None


def tensors_at(content: Mapping[str, Any], key: str) -> dict[str, TensorFacts]:
    """Types and shapes of tensors by name."""
    inner = mapping_at(content, key)
    return {name: tensor_facts_at(inner, name) for name in inner}


def count_list_at(content: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """A list of counts."""
    value = content.get(key)
    if not isinstance(value, list):
        raise ValueError(f"{key!r:.100} is no list: {value!r:.100}")
    return tuple(_count(size, key) for size in value)


def _count(value: Any, key: str) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"{key!r:.100} is no size or count: {value!r:.100}")
    return value
