"""The order of samples: a permutation that is computed, not stored."""

import hashlib

import numpy as np
import numpy.typing as npt

_NUM_ROUNDS = 6  # Luby and Rackoff 1988: four hide the order; two more for small domains


class Permutation:
    """A seeded bijection of ``range(size)``: any place is found without the others.

    A Feistel network over the next even power of two, applied again to whatever lies outside
    (cycle walking). It takes no memory, whatever the size.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self._size = size
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_bits = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        self._keys = [_key(seed, epoch, number) for number in range(_NUM_ROUNDS)]

    def __call__(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return what stands at each of the places."""
        values = self._encrypt(places.astype(np.uint64))
        while (outside := values >= np.uint64(self._size)).any():
            values[outside] = self._encrypt(values[outside])
        return values.astype(np.int64)

    def _encrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> self._half_bits, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half_bits) | right


def _key(seed: int, epoch: int, number: int) -> np.uint64:
    text = f"{seed} {epoch} {number}".encode()
    return np.uint64(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()))


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64 bits: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
