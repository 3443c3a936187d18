"""A checksum that costs little more than reading: sums of 64-bit words, by rows and by columns.

A file is taken as blocks of `ROWS` x `COLUMNS` little-endian words, the last one filled up with
zeros. Of each block, every row and then every column is summed modulo 2**64; the checksum is the
SHA-256 of these sums, block after block. Whatever changes within one word, and two words that have
changed places, change a sum; of anything else that happens by accident about one case in 2**64 does
not. Fletcher's checksum (1982) follows from these sums, so they miss nothing that it finds. What
somebody chooses so that it cancels out is for the SHA-256 of the file itself to find.
"""

import hashlib

import torch

ROWS, COLUMNS = 192, 128
"""Part of the format. Torch adds so few words in the calling thread alone, and they fit into a
core's own cache."""


class WordSums:
    """The checksum of bytes that come piece by piece."""

    def __init__(self) -> None:
        words = torch.zeros(ROWS * COLUMNS, dtype=torch.int64, device="cpu")
        self._bytes = memoryview(words.view(torch.uint8).numpy().data)
        self._block = words.view(ROWS, COLUMNS)
        self._used = 0
        sums = torch.empty(ROWS + COLUMNS, dtype=torch.int64, device="cpu")
        self._of_rows, self._of_columns = sums.split([ROWS, COLUMNS])
        self._sums = memoryview(sums.numpy().data)
        self._digest = hashlib.sha256()

    @property
    def room(self) -> memoryview:
        """Where the next bytes can be put, to be told of by `took`."""
        return self._bytes[self._used :]

    def took(self, count: int) -> None:
        """So many bytes have been put into `room`."""
        self._used += count
        if self._used == len(self._bytes):
            self._add_block()

    def update(self, data: bytes | memoryview) -> None:
        """Add ``data``; a memoryview must be one of bytes."""
        left = memoryview(data)
        while left:
            room = self.room
            count = min(len(room), len(left))
            room[:count] = left[:count]
            left = left[count:]
            self.took(count)

    def finish(self) -> str:
        """Hexadecimal, of all bytes; none can follow."""
        if self._used:
            self._block.view(-1).view(torch.uint8)[self._used :] = 0
            self._add_block()
        return self._digest.hexdigest()

    def _add_block(self) -> None:
        torch.sum(self._block, 1, out=self._of_rows)
        torch.sum(self._block, 0, out=self._of_columns)
        self._digest.update(self._sums)
        self._used = 0
