"""The documents inside a file, and the passages they are cut into."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dmuon_platform.errors import SpecError

_JSONL = {".jsonl", ".ndjson", ".json"}
_PARQUET = {".parquet", ".pq"}
_ROWS = 1024  # of a Parquet file in memory at a time


def read_documents(file: Path, text_field: str) -> Iterator[bytes]:
    """Yield each document's text as UTF-8: lines of JSONL, rows of Parquet, else the whole file.

    Empty documents are left out.

    Raises:
        SpecError: The file is not what its name says, or has no text under ``text_field``.
    """
    suffix = file.suffix.lower()
    try:
        if suffix in _JSONL:
            documents = _read_jsonl(file, text_field)
        elif suffix in _PARQUET:
            documents = _read_parquet(file, text_field)
        else:
            documents = _read_text(file)
        yield from (document for document in documents if document)
    except (OSError, pa.ArrowException) as error:
        raise SpecError(f"data.source: {file} cannot be read: {error}") from error


def cut_passages(document: bytes, limit: int) -> Iterator[bytes]:
    """Cut a document into passages of at most ``limit`` bytes, after a line end where there is one.

    Never within a character; together they are the document.
    """
    start = 0
    while len(document) - start > limit:
        end = document.rfind(b"\n", start, start + limit) + 1
        if end <= start:
            end = start + limit
            while end > start + 1 and document[end] & 0xC0 == 0x80:  # within a character
                end -= 1
        yield document[start:end]
        start = end
    yield document[start:]


def _read_text(file: Path) -> Iterator[bytes]:
    data = file.read_bytes()
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise SpecError(
            f"data.source: {file} is not UTF-8 text (byte {error.start}); convert it, or leave it "
            "out of the glob."
        ) from error
    yield data


def _read_jsonl(file: Path, text_field: str) -> Iterator[bytes]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _text_of(line, text_field, f"{file}, line {number}")


def _text_of(line: bytes, text_field: str, place: str) -> bytes:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise SpecError(
            f"data.source: {place} is not JSON ({error}); each line must be one JSON object."
        ) from error
    if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
        found = f"has the fields {sorted(row)}" if isinstance(row, dict) else "is no JSON object"
        raise SpecError(
            f"data.source: {place} {found}, and no text under data.text_field = {text_field!r}."
        )
    return row[text_field].encode("utf-8", "replace")  # JSON can hold half a character


def _read_parquet(file: Path, text_field: str) -> Iterator[bytes]:
    with pq.ParquetFile(file) as parquet:
        schema = parquet.schema_arrow
        if text_field not in schema.names:
            raise SpecError(
                f"data.source: {file} has the columns {sorted(schema.names)}, and no "
                f"data.text_field = {text_field!r}."
            )
        kind = schema.field(text_field).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise SpecError(
                f"data.source: column {text_field!r} of {file} holds {kind}, not text; name "
                "another one with data.text_field."
            )
        for batch in parquet.iter_batches(_ROWS, columns=[text_field]):
            yield from (text.encode() for text in batch.column(0).to_pylist() if text is not None)
