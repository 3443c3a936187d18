"""The header of a safetensors file: which bytes of it are which tensor.

A file is 8 bytes with the length of the header, little-endian, then the header, JSON padded with
spaces, then the values. The values of one tensor follow those of another without gaps.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dmuon.checkpoint import fields
from dmuon.checkpoint.facts import TensorFacts
from dmuon.checkpoint.plain_json import parse
from dmuon.errors import DamagedCheckpointError

_LENGTH_BYTES = 8
_ALIGNMENT = 8
_MOST_BYTES = 100_000_000  # what the safetensors library reads
_METADATA = "__metadata__"


@dataclass(frozen=True)
class Span:
    """Where a tensor is in its file.

    Attributes:
        facts: its type and shape.
        begin: position of its first byte in the file.
    """

    facts: TensorFacts
    begin: int

    @property
    def end(self) -> int:
        """Position after its last byte."""
        return self.begin + self.facts.num_bytes


def file_order(facts: Mapping[str, TensorFacts]) -> list[str]:
    """The names in the order of their values in a file: so each is aligned to its own values."""
    return sorted(facts, key=lambda name: -facts[name].itemsize)


def make_header(facts: Mapping[str, TensorFacts]) -> bytes:
    """The first bytes of a file with these tensors, up to the first value.

    Raises:
        ValueError: the names are too many or too long, or one is reserved.
    """
    if _METADATA in facts:
        raise ValueError(f"no tensor can be called {_METADATA}")
    content: dict[str, Any] = {_METADATA: {"format": "pt"}}  # transformers asks for it
    begin = 0
    for name in file_order(facts):
        end = begin + facts[name].num_bytes
        content[name] = {
            "dtype": facts[name].dtype,
            "shape": list(facts[name].shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _MOST_BYTES:
        raise ValueError(f"{len(facts)} tensors need a header of {len(text)} bytes: too long")
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(path: Path) -> dict[str, Span]:
    """Where the tensors of a file are, which may be anybody's: all is checked.

    Raises:
        DamagedCheckpointError: it is no whole safetensors file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            text = _header_text(file, size)
        content = fields.mapping(parse(text), "its header")
        return _spans(content, _LENGTH_BYTES + len(text), size)
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(path, str(error)) from error


def _header_text(file: BinaryIO, size: int) -> bytes:
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if not 2 <= length <= min(_MOST_BYTES, size - _LENGTH_BYTES):
        raise ValueError(f"no header of {length} bytes can be in a file of {size}")
    return file.read(length)


def _spans(content: dict[str, Any], first: int, size: int) -> dict[str, Span]:
    """Check the header of a file whose values begin at ``first`` and end at ``size``."""
    fields.texts_at({_METADATA: content.pop(_METADATA, {})}, _METADATA)
    spans: dict[str, Span] = {}
    at = first
    for begin, end, name in sorted((*_offsets(content, name), name) for name in content):
        facts = fields.tensor_facts_at(content, name)
        if first + begin != at or end - begin != facts.num_bytes:
            raise ValueError(
                f"{name!r:.100} at [{begin}, {end}] is not the {facts.num_bytes} bytes of its "
                f"shape {list(facts.shape)}, or not right after the tensor before it"
            )
        spans[name] = Span(facts, at)
        at = spans[name].end
    if at != size:
        raise ValueError(f"its tensors end at {at}, but it has {size} bytes")
    return spans


def _offsets(content: dict[str, Any], name: str) -> tuple[int, int]:
    offsets = fields.count_list_at(fields.mapping_at(content, name), "data_offsets")
    if len(offsets) != 2:
        raise ValueError(f"the data_offsets of {name!r:.100} are not two: {offsets!r:.100}")
    return offsets
