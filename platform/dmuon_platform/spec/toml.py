"""A job as TOML text. TOML has no null, so ``"none"`` stands for it."""

import json
from collections.abc import Mapping
from typing import Any

NONE = "none"
"""How a job file of any format says that there is no value."""


def to_toml(document: Mapping[str, Any]) -> str:
    """Return plain data as TOML: values first, then each table as a section."""
    values = {key: value for key, value in document.items() if not isinstance(value, Mapping)}
    tables = {key: value for key, value in document.items() if isinstance(value, Mapping)}
    blocks = [_lines(values)] if values else []
    blocks += [f"[{key}]\n{_lines(table)}" for key, table in tables.items()]
    return "\n\n".join(blocks).rstrip() + "\n"


def toml_value(value: Any) -> str:
    """Return one value as TOML writes it, tables inline."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    # JSON writes single values as TOML does, but for null and one control character.
    text = json.dumps(NONE if value is None else value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")


def _lines(values: Mapping[str, Any]) -> str:
    return "\n".join(f"{key} = {toml_value(value)}" for key, value in values.items())
