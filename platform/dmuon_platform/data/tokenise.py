"""Tokenising with Ray Data; the only file of this package that knows Ray."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dmuon_platform.data.documents import cut_passages, read_documents
from dmuon_platform.data.tokenizer import ByteTokenizer, TextTokenizer
from dmuon_platform.data.writer import Passage
from dmuon_platform.errors import PlatformError, SpecError

_GROUP_BYTES = 4 << 20  # files of one task, unless a single one is larger; no less is divided
_BYTES_ARE_FASTER = 16  # than a vocabulary by about so much: Ray Data is worth its start later
_YIELD_BYTES = 4 << 20  # text of one block of results

_SCHEMA = pa.schema(
    {
        "file": pa.int64(),
        "passage": pa.int64(),
        "text": pa.binary(),
        "tokens": pa.binary(),
        "is_end": pa.bool_(),
        "error": pa.string(),
    }
)


@dataclass(frozen=True)
class TokeniseTask:
    """Reads, cuts and tokenises files; what Ray sends to its tasks."""

    tokenizer: TextTokenizer
    text_field: str
    passage_bytes: int

    def __call__(self, groups: pa.Table) -> Iterator[pa.Table]:
        """Yield the passages of each group of files, in order, in tables of a few MiB.

        What is wrong with a file becomes the ``error`` of a last row: an exception would be
        retried by Ray and come back as a stack trace.
        """
        for numbers, paths in zip(groups["numbers"], groups["paths"], strict=True):
            for number, path in zip(numbers.as_py(), paths.as_py(), strict=True):
                yield from self._tables(number, Path(path))

    def _tables(self, number: int, path: Path) -> Iterator[pa.Table]:
        rows: list[dict[str, Any]] = []
        num_bytes = 0
        try:
            for index, (text, is_end) in enumerate(self._passages(path)):
                rows.append(
                    {
                        "file": number,
                        "passage": index,
                        "text": text,
                        "tokens": self.tokenizer.encode(text).tobytes(),
                        "is_end": is_end,
                    }
                )
                num_bytes += len(text)
                if num_bytes >= _YIELD_BYTES:
                    yield pa.Table.from_pylist(rows, _SCHEMA)
                    rows, num_bytes = [], 0
        except SpecError as error:
            rows.append({"file": number, "error": str(error)})
        if rows:
            yield pa.Table.from_pylist(rows, _SCHEMA)

    def _passages(self, path: Path) -> Iterator[tuple[bytes, bool]]:
        for document in read_documents(path, self.text_field):
            passages = list(cut_passages(document, self.passage_bytes))
            for index, text in enumerate(passages):
                yield text, index == len(passages) - 1


def tokenise_files(files: Sequence[Path], task: TokeniseTask) -> Iterator[Passage]:
    """Tokenise the files on all CPUs of the Ray cluster and yield their passages in order.

    What is too small to divide is done here, sooner than Ray Data could start. The order is that
    of the files, whatever the number of CPUs or blocks. Memory is bounded by a few groups of
    files. The files must have the same paths on all nodes.

    Raises:
        SpecError: A file cannot be read.
    """
    groups = _group(files)
    pace = _BYTES_ARE_FASTER if isinstance(task.tokenizer, ByteTokenizer) else 1
    if sum(file.stat().st_size for file in files) <= pace * _GROUP_BYTES:
        yield from _in_order(task(pa.Table.from_pylist(groups)))
    else:
        yield from _on_all_cpus(groups, task)


def _on_all_cpus(groups: list[dict[str, Any]], task: TokeniseTask) -> Iterator[Passage]:
    import ray.data

    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    with ray.data.DataContext.current(context), _quiet():
        tables = (
            ray.data.from_items(groups, override_num_blocks=len(groups))
            .map_batches(task, batch_size=1, batch_format="pyarrow", zero_copy_batch=True)
            .iter_batches(batch_size=None, batch_format="pyarrow")
        )
        yield from _in_order(tables)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what Ray Data says about its plans off the terminal; it stays in Ray's own logs."""
    handlers = [(h, h.level) for h in logging.getLogger("ray.data").handlers if _is_terminal(h)]
    for handler, _ in handlers:
        handler.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for handler, level in handlers:
            handler.setLevel(level)


def _is_terminal(handler: logging.Handler) -> bool:
    is_stream = isinstance(handler, logging.StreamHandler)
    return is_stream and not isinstance(handler, logging.FileHandler)


def _in_order(tables: Iterator[pa.Table]) -> Iterator[Passage]:
    last = (-1, -1)
    for table in tables:
        for row in table.to_pylist():
            if row["error"] is not None:
                raise SpecError(row["error"])
            place = (row["file"], row["passage"])
            if place <= last:
                raise PlatformError(f"Ray Data returned passage {place} after {last}")
            last = place
            yield Passage(row["text"], np.frombuffer(row["tokens"], np.uint32), row["is_end"])


def _group(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Put neighbouring files together until they are worth a task."""
    groups: list[dict[str, Any]] = []
    room = 0
    for number, file in enumerate(files):
        if room <= 0:
            groups.append({"numbers": [], "paths": []})
            room = _GROUP_BYTES
        groups[-1]["numbers"].append(number)
        groups[-1]["paths"].append(str(file))
        room -= file.stat().st_size
    return groups
