import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dmuon_platform.data import check_data
from dmuon_platform.data.documents import cut_passages, read_documents
from dmuon_platform.data.sources import digest_files, find_files
from dmuon_platform.data.split import Split, passage_bytes
from dmuon_platform.errors import SpecError
from hypothesis import given
from hypothesis import strategies as st
from unit.data_builders import Settings


def test_the_standard_library_is_text_without_tests_or_packages():
    files = find_files("python-stdlib")
    names = {file.name for file in files}
    assert {"argparse.py", "typing.py"} <= names
    assert files == sorted(files)
    folders = {part for file in files for part in file.parts[-3:-1]}
    assert not folders & {"site-packages", "test", "tests"}
    assert sum(file.stat().st_size for file in files) > 5e6


def test_globs_give_sorted_files_once(tmp_path):
    for name in ("b.txt", "a.txt", "c/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    patterns = [f"{tmp_path}/**/*.txt", f"{tmp_path}/a.txt"]
    names = [file.relative_to(tmp_path.resolve()).as_posix() for file in find_files(patterns)]
    assert names == ["a.txt", "b.txt", "c/d.txt"]


def test_a_digest_follows_content_and_order_not_place(tmp_path):
    first, second = tmp_path / "1.txt", tmp_path / "2.txt"
    first.write_text("one")
    second.write_text("two")
    moved = tmp_path / "moved" / "x.txt"
    moved.parent.mkdir()
    moved.write_text("one")
    assert digest_files([first, second]) == digest_files([moved, second])
    assert digest_files([first, second]) != digest_files([second, first])
    before = digest_files([first])
    first.write_text("onE")
    assert digest_files([first]) != before


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{0}/none-*.txt", "no file matches"),
        ("{0}/missing.txt", "no file matches"),
        (["{0}/ok.txt", "{0}/none.jsonl"], r"none\.jsonl"),
        ([], "data.source is empty"),
        ("{0}/folder", "only folders"),
        ("{0}/text.txt.gz", "decompress"),
        ("{0}/empty.txt", "holds no text"),
        ("{0}/latin.txt", r"not UTF-8 text \(byte 3\)"),
        ("{0}/broken.jsonl", "line 1 is not JSON"),
        ("{0}/fields.jsonl", r"\['body', 'title'\].*data\.text_field = 'text'"),
        ("{0}/list.jsonl", "no JSON object"),
        ("{0}/fields.parquet", r"columns \['body', 'number'\]"),
        ("{0}/broken.parquet", "cannot be read"),
    ],
)
def test_a_source_that_cannot_work_is_refused_by_name(tmp_path, source, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "ok.txt").write_text("ok")
    (tmp_path / "text.txt.gz").write_bytes(b"x")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 \xe0 la")
    (tmp_path / "broken.jsonl").write_text("{text: 1}\n")
    (tmp_path / "fields.jsonl").write_text(json.dumps({"title": "a", "body": "b"}))
    (tmp_path / "list.jsonl").write_text('["text"]\n')
    pq.write_table(pa.table({"body": ["a"], "number": [1]}), tmp_path / "fields.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    one = source.format(tmp_path) if isinstance(source, str) else None
    many = None if isinstance(source, str) else [each.format(tmp_path) for each in source]
    with pytest.raises(SpecError, match=message):
        check_data(Settings(source=one if many is None else many), 256)


def test_a_column_of_numbers_is_no_text(tmp_path):
    pq.write_table(pa.table({"body": ["a"], "number": [1]}), tmp_path / "a.parquet")
    with pytest.raises(SpecError, match="holds int64, not text"):
        check_data(Settings(source=str(tmp_path / "a.parquet"), text_field="number"), 256)


def test_documents_of_all_formats_are_the_same(tmp_path):
    texts = ["first\n", "zweite Zeile: ä", "", "三"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    pq.write_table(pa.table({"text": [*texts, None]}), tmp_path / "a.parquet")
    expected = [text.encode() for text in texts if text]
    assert list(read_documents(tmp_path / "a.jsonl", "text")) == expected
    assert list(read_documents(tmp_path / "a.parquet", "text")) == expected
    (tmp_path / "a.txt").write_text(texts[1])
    assert list(read_documents(tmp_path / "a.txt", "text")) == [texts[1].encode()]


@given(text=st.text(alphabet="ab\nä三😀", max_size=300), limit=st.integers(4, 50))
def test_passages_are_the_document_cut_between_characters(text, limit):
    parts = list(cut_passages(text.encode(), limit))
    assert b"".join(parts) == text.encode()
    assert all(len(part) <= limit for part in parts)
    assert "".join(part.decode() for part in parts) == text


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=300),
    fraction=st.floats(0.01, 0.5),
)
def test_the_held_out_share_is_right_everywhere_in_the_text(sizes, fraction):
    split = Split(fraction)
    total = held_out = 0
    for size in sizes:
        total += size
        held_out += size if split.holds_out(size) else 0
        assert abs(held_out - fraction * total) <= max(sizes)


def test_nothing_is_held_out_when_nothing_should_be():
    split = Split(0.0)
    assert not any(split.holds_out(10) for _ in range(100))


def test_short_texts_are_cut_into_enough_passages(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"x" * 100_000)
    assert passage_bytes([file], 0.05) == 625
    assert passage_bytes([file] * 1000, 0.05) == 65536
    assert passage_bytes([file], 0.0001) == 64
