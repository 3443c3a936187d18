"""The tree of keys that a job can have, as its classes declare them."""

import difflib
import inspect
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dmuon_platform.spec.job import JobSpec
from dmuon_platform.spec.synonyms import SYNONYMS
from dmuon_platform.spec.toml import toml_value


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the classes of tables that a value with this annotation can be."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [found for part in typing.get_args(annotation) for found in sections_of(part)]


def field_at(path: Sequence[str]) -> FieldInfo | None:
    """Return the field that ``path`` names, or None when there is none."""
    fields: dict[str, FieldInfo] = dict(JobSpec.model_fields)
    field: FieldInfo | None = None
    for part in path:
        field = fields.get(part)
        if field is None:
            return None
        fields = {}
        for section in sections_of(field.annotation):
            fields |= section.model_fields
    return field


def keys_under(path: Sequence[str]) -> list[str]:
    """Return the keys of the table at ``path``; ``()`` is the file itself."""
    if not path:
        return list(JobSpec.model_fields)
    field = field_at(path)
    sections = [] if field is None else sections_of(field.annotation)
    return [key for section in sections for key in section.model_fields]


def all_keys() -> Iterator[str]:
    """Yield every ``section.key`` and every key outside sections."""
    for name in JobSpec.model_fields:
        inner = keys_under([name])
        yield from (f"{name}.{key}" for key in inner) if inner else [name]


def meaning(text: str | None) -> str:
    """Return a docstring on one line, with the backticks of Markdown."""
    return " ".join(inspect.cleandoc(text or "").split()).replace("``", "`")


def accepts(field: FieldInfo, kind: type) -> bool:
    """Return whether a value of that very type can stand in the field."""
    union = (typing.Union, types.UnionType)
    annotation = field.annotation
    options = typing.get_args(annotation) if typing.get_origin(annotation) in union else ()
    return annotation is kind or kind in options


def nearest_key(path: Sequence[str]) -> str | None:
    """Return the known key that the unknown one at ``path`` most likely means.

    In a section its own keys come first; outside of all, what is close is but a section's name.
    """
    *table, key = path
    synonym = SYNONYMS.get(key.lower().replace("-", "_"))
    is_ours = synonym is not None and (not table or synonym.split(".")[:-1] == table)
    close = difflib.get_close_matches(key, keys_under(table), n=1, cutoff=0.6)
    if close and not is_ours:
        return ".".join([*table, close[0]])
    if synonym is not None:
        return synonym
    elsewhere = [known for known in all_keys() if known.rpartition(".")[2] == key]
    if elsewhere:
        return elsewhere[0]
    leaves = {known.rpartition(".")[2]: known for known in all_keys()}
    close = difflib.get_close_matches(key, leaves, n=1, cutoff=0.75)
    return leaves[close[0]] if close else None


def example_of(path: Sequence[str]) -> str | None:
    """Return ``key = value`` as it could be written at ``path``."""
    field = field_at(path)
    if field is None or (sections_of(field.annotation) and field.default is None):
        return None
    if not field.is_required() and field.default is not None:
        return None if isinstance(field.default, BaseModel) else _line(path, field.default)
    return _line(path, field.examples[0]) if field.examples else None


def _line(path: Sequence[str], value: Any) -> str:
    return f"{path[-1]} = {toml_value(value)}"
