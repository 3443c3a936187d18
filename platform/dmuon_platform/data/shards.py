"""Streams of tokens on disk: numbered files of little-endian integers, read by memory map."""

import hashlib
import os
from bisect import bisect_right
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

SHARD_TOKENS = 1 << 27
"""Tokens a file: 256 MiB of uint16."""


@dataclass(frozen=True)
class Shard:
    """One file of a stream."""

    file: str
    num_tokens: int
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the narrowest type that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class ShardWriter:
    """Appends tokens to the files of one stream, durable once closed."""

    def __init__(
        self, folder: Path, stream: str, dtype: np.dtype[Any], shard_tokens: int = SHARD_TOKENS
    ) -> None:
        self._folder = folder
        self._stream = stream
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._room = 0
        self.shards: list[Shard] = []

    def append(self, tokens: npt.NDArray[np.uint32]) -> None:
        """Write tokens after those before, over as many files as they need."""
        while len(tokens):
            if self._room == 0:
                self._open_next()
            part, tokens = tokens[: self._room], tokens[self._room :]
            data = part.astype(self._dtype).tobytes()
            assert self._file is not None
            self._file.write(data)
            self._digest.update(data)
            self._room -= len(part)

    def close(self) -> list[Shard]:
        """Force the last file to disk and return all of them; nothing when called again."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            num_tokens = self._shard_tokens - self._room
            name = Path(self._file.name).name
            self.shards.append(Shard(name, num_tokens, self._digest.hexdigest()))
            self._file, self._room = None, 0
        return self.shards

    def _open_next(self) -> None:
        self.close()
        path = self._folder / f"{self._stream}-{len(self.shards):05d}.bin"
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._room = self._shard_tokens


class TokenStream:
    """The files of one stream as one long array, read in place."""

    def __init__(self, folder: Path, shards: list[Shard], dtype: np.dtype[Any]) -> None:
        self._maps = [
            np.memmap(folder / shard.file, dtype, mode="r", shape=(shard.num_tokens,))
            for shard in shards
        ]
        self._ends = list(accumulate(shard.num_tokens for shard in shards))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Return ``length`` tokens from ``start`` on; they may lie in several files."""
        if not 0 <= start <= start + length <= len(self):
            raise IndexError(f"tokens {start} to {start + length} of {len(self)}")
        parts: list[npt.NDArray[Any]] = []
        index = bisect_right(self._ends, start)
        while length > 0:
            offset = start - (self._ends[index] - len(self._maps[index]))
            parts.append(self._maps[index][offset : offset + length])
            start, length, index = start + len(parts[-1]), length - len(parts[-1]), index + 1
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)
