"""From tokenised passages, in order, to the files of a dataset."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dmuon_platform.data.bigram import BigramCounter, save_counts
from dmuon_platform.data.info import BIGRAM_FILE, DatasetInfo, write_index
from dmuon_platform.data.shards import SHARD_TOKENS, ShardWriter, digest_file, token_dtype
from dmuon_platform.data.split import Split
from dmuon_platform.data.tokenizer import TextTokenizer
from dmuon_platform.errors import SpecError


class Passage(NamedTuple):
    """A piece of a document, with its tokens."""

    text: bytes
    tokens: npt.NDArray[np.uint32]
    is_end: bool
    """Whether its document ends with it."""


class _Part:
    """One of the two parts of a dataset while it is written."""

    def __init__(
        self, folder: Path, name: str, tokenizer: TextTokenizer, shard_tokens: int
    ) -> None:
        dtype = token_dtype(tokenizer.vocab_size)
        separator = tokenizer.separator_id
        self._separator = np.array([] if separator is None else [separator], np.uint32)
        self._writer = ShardWriter(folder, name, dtype, shard_tokens)
        self.bigrams = BigramCounter()
        self.num_bytes = 0

    def add(self, passage: Passage) -> None:
        self._writer.append(passage.tokens)
        if passage.is_end:
            self._writer.append(self._separator)
        self.bigrams.add(passage.text, passage.is_end)
        self.num_bytes += len(passage.text)

    def close(self) -> None:
        self.shards = tuple(self._writer.close())
        self.num_tokens = sum(shard.num_tokens for shard in self.shards)


def write_dataset(
    folder: Path,
    passages: Iterable[Passage],
    tokenizer: TextTokenizer,
    identity: tuple[str, int, float],
    shard_tokens: int = SHARD_TOKENS,
) -> DatasetInfo:
    """Write the passages as they come, divided into training and held-out text, and commit them.

    Args:
        folder: An empty folder.
        passages: All of them, in the order of the source.
        tokenizer: What made their tokens.
        identity: The digest, the sequence length and the held-out fraction.
        shard_tokens: Tokens a file.

    Raises:
        SpecError: There is too little text for one sample of each part.
    """
    digest, sequence_length, fraction = identity
    train = _Part(folder, "train", tokenizer, shard_tokens)
    validation = _Part(folder, "validation", tokenizer, shard_tokens)
    split = Split(fraction)
    num_documents = 0
    for passage in passages:
        (validation if split.holds_out(len(passage.text)) else train).add(passage)
        num_documents += passage.is_end
    train.close()
    validation.close()
    _check_lengths(train, validation, sequence_length, fraction)
    save_counts(folder / BIGRAM_FILE, train.bigrams, validation.bigrams)
    shards = (*train.shards, *validation.shards)
    info = DatasetInfo(
        folder=str(folder),
        digest=digest,
        content_digest=hashlib.sha256("".join(s.sha256 for s in shards).encode()).hexdigest(),
        sequence_length=sequence_length,
        vocab_size=tokenizer.vocab_size,
        separator_id=tokenizer.separator_id,
        dtype=token_dtype(tokenizer.vocab_size).str,
        train_tokens=train.num_tokens,
        train_bytes=train.num_bytes,
        train_shards=train.shards,
        validation_tokens=validation.num_tokens,
        validation_bytes=validation.num_bytes,
        validation_shards=validation.shards,
        num_documents=num_documents,
        bigram_sha256=digest_file(folder / BIGRAM_FILE),
    )
    write_index(folder, info)
    return info


def _check_lengths(train: _Part, validation: _Part, sequence_length: int, fraction: float) -> None:
    total = train.num_tokens + validation.num_tokens
    if total == 0:
        raise SpecError("data.source holds no text: all documents are empty.")
    needed = sequence_length + 1
    if train.num_tokens < needed:
        raise SpecError(
            f"data.source gives {train.num_tokens} training tokens, fewer than one sample of "
            f"data.sequence_length + 1 = {needed}. Give more text or a shorter sequence_length."
        )
    if validation.num_tokens < needed:
        raise SpecError(
            f"data.validation_fraction = {fraction} holds out {validation.num_tokens} of {total} "
            f"tokens, fewer than one sample of data.sequence_length + 1 = {needed}. Give more "
            "text, a larger validation_fraction, or a shorter sequence_length."
        )
