"""Datasets for tests, made in this process, without Ray."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dmuon_platform.data import ByteTokenizer, Dataset, open_dataset
from dmuon_platform.data.documents import cut_passages
from dmuon_platform.data.shards import SHARD_TOKENS
from dmuon_platform.data.tokenizer import TextTokenizer
from dmuon_platform.data.writer import Passage, write_dataset


@dataclass(frozen=True)
class Settings:
    source: str | list[str] = "python-stdlib"
    text_field: str = "text"
    tokenizer: str = "bytes"
    sequence_length: int = 8
    validation_fraction: float = 0.1


def passages(documents: list[bytes], tokenizer: TextTokenizer, limit: int) -> Iterator[Passage]:
    for document in documents:
        parts = list(cut_passages(document, limit))
        for index, part in enumerate(parts):
            yield Passage(part, tokenizer.encode(part), index == len(parts) - 1)


def build(
    folder: Path,
    documents: list[bytes],
    *,
    tokenizer: TextTokenizer | None = None,
    limit: int = 64,
    sequence_length: int = 8,
    fraction: float = 0.1,
    shard_tokens: int = SHARD_TOKENS,
) -> Dataset:
    tokenizer = tokenizer or ByteTokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    identity = ("digest", sequence_length, fraction)
    write_dataset(folder, passages(documents, tokenizer, limit), tokenizer, identity, shard_tokens)
    return open_dataset(folder)
