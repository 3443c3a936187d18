"""Counts of neighbouring bytes: a baseline that any language model must beat."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

NUM_SYMBOLS = 256
"""The bytes of UTF-8, and as number 255, which it never uses, the end of a document."""

_END = np.array([255], np.uint8)
_BACKOFF = 4.0
_PENDING_BYTES = 1 << 20


class BigramCounter:
    """Counts the pairs of one stream of documents; 256 x 256 numbers, however long it is."""

    def __init__(self) -> None:
        self._counts = np.zeros(NUM_SYMBOLS * NUM_SYMBOLS, np.int64)
        self._pending: list[npt.NDArray[np.uint8]] = []
        self._num_pending = 0

    def add(self, text: bytes, is_end: bool) -> None:
        """Go on with ``text``, which ends its document or not."""
        symbols = np.frombuffer(text, np.uint8)
        self._pending += [symbols, _END] if is_end else [symbols]
        self._num_pending += len(text) + is_end
        if self._num_pending >= _PENDING_BYTES:
            self._count()

    def counts(self) -> npt.NDArray[np.int64]:
        """Return how often symbol j follows symbol i, at [i, j]."""
        self._count()
        return self._counts.reshape(NUM_SYMBOLS, NUM_SYMBOLS)

    def _count(self) -> None:
        if not self._pending:
            return
        symbols = np.concatenate(self._pending)
        pairs = symbols[:-1].astype(np.int64) * NUM_SYMBOLS + symbols[1:]
        self._counts += np.bincount(pairs, minlength=len(self._counts))
        self._pending, self._num_pending = [symbols[-1:]], 0


def bigram_bits(train: npt.NDArray[np.int64], scored: npt.NDArray[np.int64]) -> float:
    """Return the bits that a bigram model of ``train`` needs for all pairs of ``scored``.

    A symbol that seldom followed is backed off to how frequent it is at all (add-one), with the
    weight of 4 observations.
    """
    frequency = train.sum(0) + 1.0
    frequency /= frequency.sum()
    rows = train.sum(1, keepdims=True)
    probability = (train + _BACKOFF * frequency) / (rows + _BACKOFF)
    return float(-(scored * np.log2(probability)).sum())


def save_counts(path: Path, train: BigramCounter, validation: BigramCounter) -> None:
    """Write the counts of both parts, 2 x 256 x 256."""
    with path.open("wb") as stream:
        np.save(stream, np.stack([train.counts(), validation.counts()]))


def load_counts(path: Path) -> npt.NDArray[np.int64]:
    """Return what :func:`save_counts` wrote."""
    return np.load(path, allow_pickle=False)
