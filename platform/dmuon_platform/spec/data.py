"""Section ``data``: the text, and how it becomes samples."""

from typing import Annotated

from pydantic import Discriminator, Field, PositiveInt, Tag

from dmuon_platform.spec.section import Section

Text = Annotated[str, Field(min_length=1)]


def _one_or_many(value: object) -> str | None:
    if isinstance(value, str):
        return "one-source"
    return "many-sources" if isinstance(value, list | tuple) else None


class DataSpec(Section):
    """Where the text comes from, who cuts it into tokens, and how long a sample is."""

    source: Annotated[
        Annotated[Text, Tag("one-source")]
        | Annotated[tuple[Text, ...], Field(strict=False, min_length=1), Tag("many-sources")],
        Discriminator(
            _one_or_many,
            custom_error_type="one_or_many",
            custom_error_message="must be text, or a list of texts",
        ),
        Field(examples=["python-stdlib"]),
    ]
    """``python-stdlib`` (the interpreter's own library, always there), or one or more globs of
    text, JSONL or Parquet files."""

    text_field: Text = "text"
    """The field or column of JSONL and Parquet files that holds a document's text."""

    tokenizer: Text = "bytes"
    """``bytes``, or the path of a ``tokenizer.json``; beside ``model.path``, if unset, that in its
    folder, where there must be one."""

    sequence_length: PositiveInt = Field(examples=[1024])
    """Tokens of one sample that are predicted."""

    validation_fraction: float = Field(0.05, gt=0, lt=1)
    """The share of the text, by bytes, that is held out for evaluation."""
