import itertools
import json
import math
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
from dmuon_platform.data import FileTokenizer, check_size, open_dataset, prepare_dataset
from dmuon_platform.data.bigram import BigramCounter, bigram_bits
from dmuon_platform.data.shards import TokenStream, token_dtype
from dmuon_platform.errors import PlatformError, SpecError
from dmuon_platform.evaluation import bigram_bits_per_byte, bits_per_byte
from dmuon_platform.spec.data import DataSpec
from unit.data_builders import build

DOCUMENTS = [f"document {i}: {'word ' * (i % 9)}\n".encode() for i in range(50)]


def read_part(folder: Path, name: str) -> list[int]:
    files = sorted(folder.glob(f"{name}-*.bin"))
    return [int(token) for file in files for token in np.fromfile(file, "<u2")]


def test_the_two_parts_are_all_documents_each_once_and_in_order(tmp_path):
    info = build(tmp_path, DOCUMENTS).info
    parts = [read_part(tmp_path, name) for name in ("train", "validation")]
    found = [bytes_of(document) for part in parts for document in split_at(part, 255)]
    assert sorted(found) == sorted(DOCUMENTS)
    train = [bytes_of(document) for document in split_at(parts[0], 255)]
    assert train == [document for document in DOCUMENTS if document in train]
    assert info.train_tokens + info.validation_tokens == sum(map(len, DOCUMENTS)) + len(DOCUMENTS)
    assert info.num_documents == len(DOCUMENTS)
    assert info.validation_bytes / (info.train_bytes + info.validation_bytes) == pytest.approx(
        0.1, abs=0.02
    )


def split_at(tokens: list[int], separator: int) -> list[list[int]]:
    documents: list[list[int]] = [[]]
    for token in tokens:
        if token == separator:
            documents.append([])
        else:
            documents[-1].append(token)
    assert documents.pop() == []
    return documents


def bytes_of(tokens: list[int]) -> bytes:
    return bytes(tokens)


def test_the_size_of_files_changes_nothing_that_is_read(tmp_path):
    one = build(tmp_path / "1", DOCUMENTS)
    many = build(tmp_path / "2", DOCUMENTS, shard_tokens=7)
    assert len(many.info.train_shards) > 100
    assert one.batch(3, slice(0, 9), 9, 1).tolist() == many.batch(3, slice(0, 9), 9, 1).tolist()


def test_a_stream_refuses_what_lies_outside(tmp_path):
    build(tmp_path, DOCUMENTS, shard_tokens=50)
    info = open_dataset(tmp_path).info
    stream = TokenStream(tmp_path, list(info.train_shards), np.dtype("<u2"))
    assert len(stream.read(len(stream), 0)) == 0
    with pytest.raises(IndexError):
        stream.read(len(stream) - 3, 4)


def test_ids_are_stored_as_narrow_as_they_fit():
    assert token_dtype(1 << 16).itemsize == 2
    assert token_dtype((1 << 16) + 1).itemsize == 4


@pytest.mark.parametrize("damage", ["no-index", "cut", "missing", "format", "fields"])
def test_an_unfinished_or_damaged_dataset_is_not_opened(tmp_path, damage):
    build(tmp_path, DOCUMENTS)
    index = tmp_path / "index.json"
    fields = json.loads(index.read_text())
    shard = tmp_path / "train-00000.bin"
    if damage == "no-index":
        index.unlink()
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "missing":
        shard.unlink()
    elif damage == "format":
        index.write_text(json.dumps(fields | {"format": 99}))
    else:
        index.write_text(json.dumps({"format": fields["format"], "digest": "x"}))
    with pytest.raises(PlatformError, match="incomplete or damaged"):
        open_dataset(tmp_path)


def test_too_little_text_is_refused_with_the_numbers(tmp_path):
    with pytest.raises(SpecError, match="holds no text"):
        build(tmp_path / "0", [])
    with pytest.raises(SpecError, match=r"4 training tokens, fewer than .* = 9"):
        build(tmp_path / "1", [b"abc"])
    with pytest.raises(SpecError, match=r"validation_fraction = 0\.01 holds out 0 of"):
        build(tmp_path / "2", [b"abc" * 20], fraction=0.01)
    info = build(tmp_path / "3", DOCUMENTS).info
    check_size(info, info.num_train_sequences)
    with pytest.raises(SpecError, match=f"at most {info.num_train_sequences}"):
        check_size(info, info.num_train_sequences + 1)


def test_bits_a_byte_of_uniform_guessing_are_eight_and_the_separators(tmp_path):
    info = build(tmp_path, DOCUMENTS).info
    separators = info.validation_tokens / info.validation_bytes
    assert bits_per_byte(math.log(256), info) == pytest.approx(8 * separators)


def test_the_bigram_knows_what_follows_what(tmp_path):
    alternating = build(tmp_path / "1", [b"ab" * 500] * 20, limit=2000)
    assert bigram_bits_per_byte(alternating) < 0.05
    rng = random.Random(0)
    noise = build(
        tmp_path / "2", [bytes(rng.choices(range(255), k=2000)) for _ in range(200)], limit=4000
    )
    assert bigram_bits_per_byte(noise) == pytest.approx(8, abs=0.3)


def test_the_bigram_counts_are_those_of_the_stream_however_it_comes():
    rng = random.Random(1)
    texts = [rng.choices(b"abc", k=rng.randrange(1, 9)) for _ in range(30)]
    counter = BigramCounter()
    symbols: list[int] = []
    for index, text in enumerate(texts):
        counter.add(bytes(text), is_end=index % 2 == 0)
        symbols += [*text, *([255] if index % 2 == 0 else [])]
        if index % 7 == 0:
            counter.counts()  # a look in between changes nothing
    expected = np.zeros((256, 256), np.int64)
    for pair in itertools.pairwise(symbols):
        expected[pair] += 1
    assert (counter.counts() == expected).all()
    assert bigram_bits(expected, expected) > 0


def test_the_bigram_does_not_depend_on_the_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    characters = sorted({chr(byte) for document in DOCUMENTS for byte in document})
    words = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token=" "))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    by_bytes = build(tmp_path / "1", DOCUMENTS)
    by_words = build(tmp_path / "2", DOCUMENTS, tokenizer=FileTokenizer(words.to_str()))
    assert by_words.info.separator_id is None
    assert bigram_bits_per_byte(by_bytes) == bigram_bits_per_byte(by_words)


def test_what_a_killed_process_had_begun_to_prepare_is_removed_a_day_later(tmp_path):
    (tmp_path / "text.txt").write_text("word " * 2000)
    data = DataSpec(source=str(tmp_path / "text.txt"), sequence_length=16)
    info = prepare_dataset(data, tmp_path / "cache")
    folder = Path(info.folder)
    left, building = (tmp_path / "cache" / f".{folder.name}.far-{pid}" for pid in (7, 8))
    for each in (left, building):
        each.mkdir()
        (each / "train-00000.bin").write_bytes(b"half")
    yesterday = time.time() - 25 * 60 * 60
    for path in (left / "train-00000.bin", left, building):
        os.utime(path, (yesterday, yesterday))
    (folder / "index.json").unlink()
    other = tmp_path / "cache" / f".{folder.name}.notes"  # which nobody was preparing
    other.touch()
    assert prepare_dataset(data, tmp_path / "cache") == info
    assert sorted((tmp_path / "cache").iterdir()) == [building, other, folder]
