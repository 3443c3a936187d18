"""Every key of a job in Markdown, as the classes of its sections say it."""

import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dmuon_platform.spec.fields import meaning, sections_of
from dmuon_platform.spec.job import JobSpec
from dmuon_platform.spec.toml import toml_value


def reference() -> str:
    """Return a table of keys, defaults and meanings for each section, in the order of the job."""
    return "\n\n".join(_sections()) + "\n"


def _sections() -> Iterator[str]:
    fields = JobSpec.model_fields
    tables = {name: sections_of(field.annotation) for name, field in fields.items()}
    yield _table("", {name: field for name, field in fields.items() if not tables[name]})
    for name, classes in tables.items():
        for section in classes:
            yield from _section(name, section)


def _section(name: str, section: type[BaseModel]) -> Iterator[str]:
    title = f"### `[{name}]`\n\n{_words(section.__doc__)}"
    yield f"{title}\n\n{_table(name, section.model_fields)}"
    for key, field in section.model_fields.items():
        for inner in sections_of(field.annotation):
            place = f"{name}.{key}"
            about = f"Each table in `{place}`" if _is_list(field) else f"`{place}` as a table"
            yield f"{about}:\n\n{_table(place, inner.model_fields)}"


def _table(place: str, fields: dict[str, FieldInfo]) -> str:
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, field in fields.items():
        choices = list(_choices(field.annotation))
        kinds = f" One of {', '.join(choices)}." if choices else ""
        lines.append(f"| `{key}` | {_default(field)} | {_words(field.description)}{kinds} |")
    return "\n".join(lines)


def _choices(annotation: Any) -> Iterator[str]:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        yield from (f"`{toml_value(each.value)}`" for each in annotation)
    elif typing.get_origin(annotation) is typing.Literal:
        options = typing.get_args(annotation)
        yield from (f"`{toml_value(each)}`" for each in options if len(options) > 1)
    else:
        for part in typing.get_args(annotation):
            yield from _choices(part)


def _default(field: FieldInfo) -> str:
    return "*required*" if field.is_required() else f"`{toml_value(field.get_default())}`"


def _is_list(field: FieldInfo) -> bool:
    return isinstance(field.default, tuple)


def _words(text: str | None) -> str:
    """A docstring as a cell of a table."""
    return meaning(text).replace("|", "\\|")
