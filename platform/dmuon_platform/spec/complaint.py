"""What pydantic found wrong, in words for the author of a job file."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import ErrorDetails

from dmuon_platform.spec.fields import example_of, keys_under, nearest_key
from dmuon_platform.spec.problem import Problem
from dmuon_platform.spec.toml import toml_value
from dmuon_platform.spec.uri import without_credentials

UNION_TAGS = frozenset(
    {
        "one-source",
        "many-sources",
        "fixed-workers",
        "elastic-workers",
        "one-rank",
        "every-rank",
    }
)
"""Names of alternatives, which pydantic puts between the keys."""

RULES: Mapping[str, str] = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "finite_number": "must be a finite number",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must be letters, digits, '.', '_' and '-', beginning with one of "
    "the first two",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
}
"""By pydantic's type of error, with its context to fill in."""


def path_of(error: ErrorDetails) -> tuple[str, ...]:
    """Return the keys from the file down to what is wrong, without list positions."""
    return tuple(part for part in error["loc"] if isinstance(part, str) and part not in UNION_TAGS)


def problem_of(error: ErrorDetails) -> Problem:
    """Put one error into words."""
    path = path_of(error)
    key = ".".join(path) or "the job file"
    if error["type"] == "extra_forbidden":
        return _unknown(path)
    if error["type"] == "missing":
        return _missing(path, in_list=isinstance(error["loc"][-1], int))
    template = RULES.get(error["type"])
    context = error.get("ctx", {})
    rule = error["msg"][:1].lower() + error["msg"][1:] if template is None else template
    if template is not None:
        rule = template.format(**context)
    return Problem(key, f"{rule}, not {_shown(error['input'])}", _way_out(path, error))


def _unknown(path: Sequence[str]) -> Problem:
    *table, key = path
    what = "key" if table or "." in key else "key or section"
    nearest = nearest_key(path)
    known = ", ".join(keys_under(table))
    where = f"section {'.'.join(table)!r}" if table else "a job file"
    way_out = f"did you mean {nearest}?" if nearest else f"{where} has {known}"
    return Problem(
        ".".join(path), f"there is no such {what}", way_out, (nearest,) if nearest else ()
    )


def _missing(path: Sequence[str], in_list: bool) -> Problem:
    if in_list:
        way_out = f"write {example_of(path)}, say"
        return Problem(".".join(path), "must have more items", way_out)
    example = example_of(path)
    if example is None:
        keys = ", ".join(keys_under(path))
        way_out = f"write [{path[-1]}] with its keys ({keys})" if keys else f"write {path[-1]}"
        return Problem(".".join(path), "is required", way_out)
    return Problem(".".join(path), "is required", f"write {example}, say")


def _way_out(path: Sequence[str], error: ErrorDetails) -> str:
    choices = _choices(error)
    close = difflib.get_close_matches(str(error["input"]), choices, n=1, cutoff=0.5)
    if close:
        return f'write {path[-1]} = "{close[0]}"'
    example = example_of(path)
    if example is not None:
        return f"write {example}, say"
    keys = keys_under(path)
    if keys:
        return f"write [{path[-1]}] with its keys ({', '.join(keys)})"
    return f"correct it, or remove {path[-1]}" if path else "see `dmuon schema`"


def _choices(error: ErrorDetails) -> list[str]:
    if error["type"] not in ("literal_error", "enum"):
        return []
    expected = str(error.get("ctx", {}).get("expected", ""))
    return [part.strip(" '") for part in expected.replace(" or ", ", ").split(",")]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a table"
    try:
        text = without_credentials(toml_value(value))
    except TypeError:  # a date, say, which TOML and YAML have
        text = f"{value} ({type(value).__name__})"
    return text if len(text) <= 60 else f"{text[:57]}..."
