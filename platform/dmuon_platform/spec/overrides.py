"""``--set section.key=value``: changes to a job file, from the command line."""

import tomllib
from collections.abc import Iterable
from typing import Any

from dmuon_platform.errors import SpecError
from dmuon_platform.spec.document import Document
from dmuon_platform.spec.fields import accepts, field_at


def override(document: Document, assignments: Iterable[str]) -> Document:
    """Return the document with the assignments made, in their order.

    Raises:
        SpecError: An assignment has no ``=``, or goes through something that is not a table.
    """
    result = _copy(document)
    for assignment in assignments:
        _, equals, text = assignment.partition("=")
        path = key_of(assignment).split(".")
        if not equals or not all(path):
            raise SpecError(
                f"--set {assignment}: must be section.key=value; write for example "
                "--set train.steps=100"
            )
        _assign(result, path, _value(path, text.strip()), assignment)
    return result


def key_of(assignment: str) -> str:
    """Return the ``section.key`` that an assignment changes."""
    return assignment.partition("=")[0].strip()


def _assign(document: Document, path: list[str], value: Any, assignment: str) -> None:
    table: Any = document
    for depth, part in enumerate(path[:-1]):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            above = ".".join(path[: depth + 1])
            raise SpecError(
                f"--set {assignment}: {above} is {table!r} and not a table; write "
                f"--set '{above}={{{path[depth + 1]}=...}}' to replace it"
            )
    table[path[-1]] = value


def _value(path: list[str], text: str) -> Any:
    field = field_at(path)
    if field is not None and accepts(field, str) and not text.startswith(('"', "'")):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a word without quotes


def _copy(document: Document) -> Document:
    return {
        key: _copy(value) if isinstance(value, dict) else value for key, value in document.items()
    }
