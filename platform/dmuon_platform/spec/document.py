"""A job file as plain data, before anything is checked."""

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from dmuon_platform.errors import SpecError

Document = dict[str, Any]


def read_document(path: Path) -> Document:
    """Read a TOML, YAML or JSON file.

    Raises:
        SpecError: There is no such file, or it is not what its name says.
    """
    parse = PARSERS.get(path.suffix.lower())
    text = _read_text(path)
    if parse is None:
        known = ", ".join(PARSERS)
        raise SpecError(f"{path}: a job file ends in one of {known}; rename it, or convert it")
    try:
        document = parse(text)
    except (ValueError, yaml.YAMLError) as error:  # of TOML and JSON: subclasses of ValueError
        kind = path.suffix.lower().removeprefix(".").upper()
        raise SpecError(f"{path}: is not {kind} that can be read; {_complaint(error)}") from error
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise SpecError(
            f"{path}: a job is a table of sections, not {type(document).__name__}; "
            "see jobs/tiny_cpu.toml"
        )
    return {str(key): value for key, value in document.items()}


def _complaint(error: Exception) -> str:
    """What a parser says, with the place; YAML's own text speaks of a string of Python."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} (at line {mark.line + 1}, column {mark.column + 1})"
    return str(error)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{path}: is not UTF-8 text (byte {error.start}); save it as that"
        ) from error
    except FileNotFoundError as error:
        raise SpecError(f"{path}: there is no such file; {_neighbours(path)}") from error
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}); name a job file") from error


def _neighbours(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist either (seen from {Path.cwd()})"
    names = sorted(file.name for file in folder.iterdir() if file.suffix.lower() in PARSERS)
    close = difflib.get_close_matches(path.name, names, n=1)
    if close:
        return f"did you mean {folder / close[0]}?"
    return f"{folder} has {', '.join(names[:10])}" if names else f"{folder} has no job files"


def _parse_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_without_doubles) if text.strip() else {}


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"the key {key!r} is there twice in one table")
        table[key] = value
    return table


class _Loader(yaml.SafeLoader):
    """YAML as one expects it: 1e-3 is a number, and a key may be there once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"the key {key!r} is there twice in one table")
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # a SafeLoader


PARSERS: Mapping[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".json": _parse_json,
}
