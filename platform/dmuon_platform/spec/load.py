"""From a job file to a checked job, or to everything that is wrong with it."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from dmuon_platform.errors import SpecError
from dmuon_platform.spec.complaint import path_of, problem_of
from dmuon_platform.spec.document import Document, read_document
from dmuon_platform.spec.fields import accepts, field_at
from dmuon_platform.spec.job import RULES_BROKEN, JobSpec
from dmuon_platform.spec.overrides import key_of, override
from dmuon_platform.spec.problem import Problem
from dmuon_platform.spec.toml import NONE


def load_job(
    path: Path | str,
    overrides: Sequence[str] = (),
    options: Mapping[str, str] = MappingProxyType({}),
) -> JobSpec:
    """Read and check a job file.

    Args:
        path: A TOML, YAML or JSON file.
        overrides: Changes to it, each ``section.key=value``.
        options: By key, the option that has changed it where that was not ``--set``.

    Raises:
        SpecError: All that is wrong with it, one ``section.key: rule; way out`` a line, and before
            it the option for what was not written in the file.
    """
    file = read_document(Path(path))
    document = override(file, overrides)
    changed = dict.fromkeys(map(key_of, overrides), "--set ")
    changed |= {key: f"{option} sets " for key, option in options.items()}
    return job_of(document, str(path), changed, file)


def job_of(
    document: Document,
    source: str = "the job",
    changed: Mapping[str, str] = MappingProxyType({}),
    file: Mapping[str, Any] = MappingProxyType({}),
) -> JobSpec:
    """Check plain data and return the job it describes.

    Args:
        document: The data.
        source: Where it was written.
        changed: By key, what a problem with it begins with where it was written elsewhere.
        file: What was written in the source itself.

    Raises:
        SpecError: As `load_job`.
    """
    document = _with_nones(document)
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        problems = _problems(document, error)
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = "\n".join(f"  {_told(problem, changed, file)}" for problem in problems)
    raise SpecError(f"{source} has {count}:\n{lines}")


def _told(problem: Problem, changed: Mapping[str, str], file: Mapping[str, Any]) -> str:
    """Return a problem as one line, with where its key or a table around it was written.

    A table that the file has not was written by the change of a key in it.
    """
    is_in_file = _has(file, problem.key.split("."))
    beginnings = [
        beginning
        for key, beginning in changed.items()
        if f"{problem.key}.".startswith(f"{key}.")
        or (key.startswith(f"{problem.key}.") and not is_in_file)
    ]
    return f"{beginnings[-1] if beginnings else ''}{problem}"


def _has(table: Any, path: Sequence[str]) -> bool:
    if not path:
        return True
    is_there = isinstance(table, Mapping) and path[0] in table
    return is_there and _has(table[path[0]], path[1:])


def _problems(document: Document, error: ValidationError) -> list[Problem]:
    fields, rules = _sorted_out(error)
    if fields:
        # The rules between keys are looked at only when all keys are right by themselves. So look
        # again without the wrong ones, and believe the rules that do not read any of those.
        wrong = {path_of(one) for one in error.errors()}
        try:
            JobSpec.model_validate(_without(document, wrong))
        except ValidationError as again:
            suspects = {".".join(path) for path in wrong} | {
                key for problem in fields for key in problem.reads
            }
            rules = [rule for rule in _sorted_out(again)[1] if not _reads(rule, suspects)]
    meant = {key for problem in fields for key in problem.reads}
    kept = [one for one in fields if not (one.rule == "is required" and one.key in meant)]
    return kept + rules


def _sorted_out(error: ValidationError) -> tuple[list[Problem], list[Problem]]:
    """Return what is wrong with single keys, and what our own rules found."""
    fields: list[Problem] = []
    rules: list[Problem] = []
    for one in error.errors():
        if one["type"] == RULES_BROKEN:
            rules += one["ctx"]["problems"]
        else:
            fields.append(problem_of(one))
    return fields, rules


def _reads(rule: Problem, suspects: Collection[str]) -> bool:
    keys = (rule.key, *rule.reads)
    return any(key == one or key.startswith(f"{one}.") for key in keys for one in suspects)


def _without(document: Document, wrong: Collection[tuple[str, ...]]) -> Document:
    def kept(table: dict[str, Any], above: tuple[str, ...]) -> dict[str, Any]:
        return {
            key: kept(value, (*above, key)) if isinstance(value, dict) else value
            for key, value in table.items()
            if (*above, key) not in wrong
        }

    return kept(document, ())


def _with_nones(table: dict[str, Any], above: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the document with ``"none"`` read as no value, where no value is possible."""
    result: dict[str, Any] = {}
    for key, value in table.items():
        path = (*above, str(key))
        if isinstance(value, dict):
            result[path[-1]] = _with_nones(value, path)
        elif isinstance(value, list | tuple) and any(isinstance(one, dict) for one in value):
            result[path[-1]] = [
                _with_nones(one, path) if isinstance(one, dict) else one for one in value
            ]
        else:
            field = field_at(path)
            is_none = value == NONE and field is not None and accepts(field, type(None))
            result[path[-1]] = None if is_none else value
    return result
