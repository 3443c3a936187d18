"""The documents inside a file, and the passages they are cut into."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dmuon_platform.errors import SpecError

_JSONL = {".jsonl", ".ndjson", ".json"}
_PARQUET = {".parquet", ".pq"}
_FIRST = 100  # records that tell which fields there are
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


def text_fields(file: Path) -> list[str] | None:
    """Return the fields or columns that hold text in each of the first records, in their order.

    None for a file without fields, which is one document.

    Raises:
        SpecError: The file is not what its name says.
    """
    suffix = file.suffix.lower()
    try:
        if suffix in _JSONL:
            records = list(islice(_records(file), _FIRST))
            first = records[0][0] if records else {}
            return [key for key in first if all(isinstance(r.get(key), str) for r, _ in records)]
        if suffix in _PARQUET:
            schema = pq.read_schema(file)
            return [field.name for field in schema if _is_text(field.type)]
    except (OSError, pa.ArrowException) as error:
        raise SpecError(f"data.source: {file} cannot be read: {error}") from error
    return None


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
    for record, place in _records(file):
        text = record.get(text_field)
        if not isinstance(text, str):
            raise SpecError(
                f"data.source: {place} has the fields {sorted(record)}, and no text under "
                f"data.text_field = {text_field!r}."
            )
        yield text.encode("utf-8", "replace")  # JSON can hold half a character


def _records(file: Path) -> Iterator[tuple[dict[str, object], str]]:
    """Yield the object of each line, and where it stands."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _record(line, f"{file}, line {number}")


def _record(line: bytes, place: str) -> tuple[dict[str, object], str]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise SpecError(
            f"data.source: {place} is not JSON ({error}); each line must be one JSON object."
        ) from error
    if not isinstance(record, dict):
        raise SpecError(f"data.source: {place} is no JSON object, as each line must be.")
    return record, place


def _read_parquet(file: Path, text_field: str) -> Iterator[bytes]:
    with pq.ParquetFile(file) as parquet:
        schema = parquet.schema_arrow
        if text_field not in schema.names:
            raise SpecError(
                f"data.source: {file} has the columns {sorted(schema.names)}, and no "
                f"data.text_field = {text_field!r}."
            )
        kind = schema.field(text_field).type
        if not _is_text(kind):
            raise SpecError(
                f"data.source: column {text_field!r} of {file} holds {kind}, not text; name "
                "another one with data.text_field."
            )
        for batch in parquet.iter_batches(_ROWS, columns=[text_field]):
            yield from (text.encode() for text in batch.column(0).to_pylist() if text is not None)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
