"""Which passages are held out: decided one after the other, from their sizes alone."""

from collections.abc import Sequence
from pathlib import Path

_MAX_PASSAGE_BYTES = 64 << 10
_MIN_PASSAGE_BYTES = 64
_WANTED_PASSAGES = 8  # in a held-out part of a short text


class Split:
    """Holds out a fixed fraction of the bytes, spread evenly over the text.

    A passage is held out when that brings the share nearest to the fraction (error diffusion), so
    neither a seed nor the total is needed. Documents shorter than a passage are never divided.
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._num_bytes = 0
        self._num_held_out = 0

    def holds_out(self, num_bytes: int) -> bool:
        """Say whether the next passage, of ``num_bytes``, is held out."""
        self._num_bytes += num_bytes
        wanted = self._fraction * self._num_bytes - self._num_held_out
        if self._fraction <= 0 or wanted < num_bytes / 2:
            return False
        self._num_held_out += num_bytes
        return True


def passage_bytes(files: Sequence[Path], fraction: float) -> int:
    """Return the longest passage: 64 KiB, or less where the held-out part would be a few only."""
    total = sum(file.stat().st_size for file in files)
    wanted = int(fraction * total / _WANTED_PASSAGES)
    return max(_MIN_PASSAGE_BYTES, min(_MAX_PASSAGE_BYTES, wanted))
