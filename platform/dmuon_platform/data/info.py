"""What a prepared dataset is: its index file, written last."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dmuon_platform.data.shards import Shard
from dmuon_platform.durable_file import sync
from dmuon_platform.errors import PlatformError

INDEX = "index.json"
BIGRAM_FILE = "bigram.npy"
FORMAT = 1


@dataclass(frozen=True)
class DatasetInfo:
    """The facts of a prepared dataset; plain data, the same whoever prepared it."""

    folder: str
    digest: str
    """SHA-256 over source, tokenizer, settings and format: what it was made from."""
    content_digest: str
    """SHA-256 over all tokens: what it became."""
    sequence_length: int
    vocab_size: int
    separator_id: int | None
    dtype: str
    train_tokens: int
    train_bytes: int
    train_shards: tuple[Shard, ...]
    validation_tokens: int
    validation_bytes: int
    validation_shards: tuple[Shard, ...]
    num_documents: int
    bigram_sha256: str

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text a token, in the held-out part."""
        return self.validation_bytes / self.validation_tokens

    @property
    def num_train_sequences(self) -> int:
        """Samples of one epoch; neighbours share one token, a target here and an input there."""
        return max(0, (self.train_tokens - 1) // self.sequence_length)

    @property
    def num_validation_sequences(self) -> int:
        """Held-out samples."""
        return max(0, (self.validation_tokens - 1) // self.sequence_length)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, without the folder: where it lies is not what it is."""
        return {key: value for key, value in asdict(self).items() if key != "folder"}


def write_index(folder: Path, info: DatasetInfo) -> None:
    """Commit a dataset: after this, and not before, its folder counts."""
    temporary = folder / f".{INDEX}.tmp"
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump({"format": FORMAT, **info.to_dict()}, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(folder / INDEX)
    sync(folder)


def read_index(folder: Path) -> DatasetInfo:
    """Read the index of a dataset and check that its files have the sizes it says.

    Raises:
        PlatformError: It was not finished, is of another format, or files are missing or cut.
    """
    try:
        fields = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if fields.pop("format") != FORMAT:
            raise ValueError("another format")
        info = _info(folder, fields)
        for shard in (*info.train_shards, *info.validation_shards):
            expected = shard.num_tokens * int(info.dtype[-1])
            if (folder / shard.file).stat().st_size != expected:
                raise ValueError(f"{shard.file} is not {expected} bytes long")
        (folder / BIGRAM_FILE).stat()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlatformError(
            f"The prepared dataset {folder} is incomplete or damaged ({error}). Delete the folder; "
            "launching the job prepares it again."
        ) from error
    return info


def _info(folder: Path, fields: Mapping[str, Any]) -> DatasetInfo:
    shards = {
        key: tuple(Shard(**shard) for shard in fields[key])
        for key in ("train_shards", "validation_shards")
    }
    return DatasetInfo(folder=str(folder), **{**fields, **shards})
