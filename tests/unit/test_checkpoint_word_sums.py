"""The fast checksum: what it is, for ever, and what cannot happen to a file without changing it."""

import hashlib
import random
import struct
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.checkpoint.word_sums import COLUMNS, ROWS, WordSums

ROW_BYTES = COLUMNS * 8
BLOCK_BYTES = ROWS * ROW_BYTES
FILE = random.Random(0).randbytes(2 * BLOCK_BYTES + 5 * ROW_BYTES + 11)


def checksum(*pieces: bytes) -> str:
    sums = WordSums()
    for piece in pieces:
        sums.update(piece)
    return sums.finish()


def by_formula(data: bytes) -> str:
    """As the documentation of the module has it, word by word."""
    digest = hashlib.sha256()
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0")
        words = struct.unpack(f"<{ROWS * COLUMNS}Q", block)
        rows = [sum(words[r * COLUMNS : (r + 1) * COLUMNS]) for r in range(ROWS)]
        columns = [sum(words[c::COLUMNS]) for c in range(COLUMNS)]
        sums = [each % 2**64 for each in rows + columns]
        digest.update(struct.pack(f"<{len(sums)}Q", *sums))
    return digest.hexdigest()


@pytest.mark.parametrize("length", [0, 1, 8, BLOCK_BYTES - 1, BLOCK_BYTES, len(FILE)])
def test_it_is_what_the_format_says(length: int) -> None:
    assert checksum(FILE[:length]) == by_formula(FILE[:length])


def test_its_numbers_never_change() -> None:
    assert (ROWS, COLUMNS) == (192, 128)
    wanted = "c92b5d9dca671c115580a66c5cfd00c3159da0855f2682378a16f8f8b2ba32b4"
    assert checksum(bytes(range(256)) * 1000) == wanted


@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, len(FILE)), max_size=6))
def test_it_does_not_matter_in_which_pieces_bytes_come(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(FILE)]
    pieces = [FILE[begin:end] for begin, end in pairwise(places)]
    assert checksum(*pieces) == checksum(FILE)


@settings(max_examples=100)
@given(
    size=st.sampled_from([1, 8, 512, ROW_BYTES, 4096, BLOCK_BYTES]),
    one=st.integers(0, 10**6),
    other=st.integers(0, 10**6),
)
def test_parts_that_change_places_change_it(size: int, one: int, other: int) -> None:
    """Bytes, words, sectors, rows, pages and blocks."""
    count = len(FILE) // size
    one, other = sorted((one % count * size, other % count * size))
    spoilt = bytearray(FILE)
    spoilt[one : one + size], spoilt[other : other + size] = (
        FILE[other : other + size],
        FILE[one : one + size],
    )
    assert (checksum(bytes(spoilt)) == checksum(FILE)) == (spoilt == FILE)


@settings(max_examples=100)
@given(
    place=st.integers(0, len(FILE) - 1),
    put=st.sampled_from([b"\0", b"\xff", b"\0" * 512, b"\0" * 4096, FILE[-4096:]]),
)
def test_parts_that_are_lost_or_stale_change_it(place: int, put: bytes) -> None:
    spoilt = (FILE[:place] + put + FILE[place + len(put) :])[: len(FILE)]
    assert (checksum(spoilt) == checksum(FILE)) == (spoilt == FILE)
