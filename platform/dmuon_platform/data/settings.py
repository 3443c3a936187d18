"""What the data package reads of a job's ``data`` section."""

from collections.abc import Sequence
from typing import Protocol


class DataSettings(Protocol):
    """The fields of ``spec.data``."""

    @property
    def source(self) -> str | Sequence[str]:
        """``"python-stdlib"``, or one or more globs of text, JSONL or Parquet files."""

    @property
    def text_field(self) -> str:
        """The field or column of JSONL and Parquet files that holds a document's text."""

    @property
    def tokenizer(self) -> str:
        """``"bytes"``, or the path of a ``tokenizer.json``."""

    @property
    def sequence_length(self) -> int:
        """Tokens of one sample that are predicted."""

    @property
    def validation_fraction(self) -> float:
        """The share of the text, by bytes, that is held out."""
