"""``dmuon checkpoint``: what is in checkpoints, whether they are whole, and their weights."""

import argparse
import json
import math
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dmuon
from dmuon_platform.aside import all_aside, why_aside
from dmuon_platform.catalogue import CHECKPOINTS_FOLDER
from dmuon_platform.checkpoint_copy import Place, copy_checkpoint
from dmuon_platform.errors import CopyError, DamagedSourceError, NoCheckpointError
from dmuon_platform.run_folder import default_storage, is_run, runs_in
from dmuon_platform.text_table import text_table

GOOD, DIFFERENT, BAD_USE = 0, 1, 2
_MIB = 2**20
_MOST_LINES = 50
"""Of one table of differences; ``--json`` has them all."""


@dataclass
class _Answer:
    """What an action found.

    Attributes:
        code: of exit.
        facts: for programs.
        lines: for people.
    """

    facts: dict[str, Any]
    lines: list[str]
    code: int = GOOD
    complaints: list[str] = field(default_factory=list)


def run(arguments: argparse.Namespace) -> int:
    """Do what the arguments of ``dmuon checkpoint`` ask, print the answer, return the exit code."""
    try:
        _check_no_run(arguments)
        answer = _ACTIONS[arguments.action](arguments)
    except (dmuon.DMuonError, CopyError, NoCheckpointError, OSError) as error:
        if arguments.traceback:
            traceback.print_exc()
        else:
            print(f"dmuon: {_line(_words(error, arguments))}", file=sys.stderr)
        damage = dmuon.DamagedCheckpointError | DamagedSourceError | OSError
        is_damaged = isinstance(error, damage)
        return DIFFERENT if is_damaged else BAD_USE
    if arguments.json:
        print(json.dumps(_plain(answer.facts), indent=2, allow_nan=False))
    else:
        print("\n".join(answer.lines))
    for complaint in answer.complaints:
        print(f"dmuon: {_line(complaint)}", file=sys.stderr)
    return answer.code


def _check_no_run(arguments: argparse.Namespace) -> None:
    """Refuse a run where a checkpoint is wanted, by its folder or its name.

    Raises:
        NoCheckpointError: It is one.
    """
    named = [getattr(arguments, name, None) for name in ("path", "source", "a", "b", "folder")]
    for each in named:
        for path in each if isinstance(each, list) else [each]:
            if path and not Path(path).exists() and is_run(run := default_storage() / path):
                raise NoCheckpointError(
                    f"there is no folder {path}; the checkpoints of the run of that name are "
                    f"listed by: dmuon checkpoint list {shlex.quote(str(run))}"
                )
            if path is getattr(arguments, "folder", None):
                continue  # the folder of a run has a list
            if path and is_run(Path(path)):
                raise NoCheckpointError(
                    f"{path} is the folder of a run; name one of its checkpoints, which this "
                    f"lists: dmuon checkpoint list {shlex.quote(path)}"
                )


def _words(error: Exception, arguments: argparse.Namespace) -> str:
    """What to tell of an error; the system only says what it met, and not what to do about it."""
    if not isinstance(error, OSError):
        return str(error)
    met = str(error.strerror or error)
    if error.filename:
        met = f"{error.filename}: {met}"
    return f"{arguments.action} failed at {met}; name folders that you can use, with room in them"


def _list(arguments: argparse.Namespace) -> _Answer:
    folder = _listed(arguments.folder)
    aside = all_aside(folder)
    # however many of those of the highest steps are no checkpoints
    most = None if arguments.newest is None else arguments.newest + len(aside)
    found = dmuon.list_checkpoints(folder, newest=most)
    whole = [each for each in found.whole if each.path.name not in aside]
    whole = whole[-arguments.newest :] if arguments.newest else whole
    passed = [
        (each.path, each.reason, each.is_damaged)
        for each in found.passed_over
        if each.path.name not in aside
    ]
    paths = [each.path for each in found.whole] + [each.path for each in found.passed_over]
    passed += [(path, aside[path.name], False) for path in paths if path.name in aside]
    if not (whole or passed) and (runs := list(runs_in(Path(arguments.folder)))):
        raise NoCheckpointError(
            f"{arguments.folder} is the folder of all runs; name that of one: "
            f"{', '.join(shlex.quote(str(run)) for run in runs[:3])}"
        )
    facts = {
        "checkpoints": [
            {
                "path": each.path,
                "step": each.step,
                "created": _when(each.created),
                "num_bytes": each.num_bytes,
                "has_optimizer": each.has_optimizer,
                "num_weights": each.num_weights,
            }
            for each in whole
        ],
        "passed_over": [
            {"path": path, "reason": reason, "is_damaged": is_damaged}
            for path, reason, is_damaged in sorted(passed)
        ],
    }
    is_damaged = any(is_damaged for _, _, is_damaged in passed)
    lines = _list_lines(facts) if whole else [f"{folder} has no whole checkpoint of DMuon in it"]
    return _Answer(facts, [*lines, *_passed_over_lines(facts)], DIFFERENT if is_damaged else GOOD)


def _list_lines(facts: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            each["path"].name,
            str(each["step"]),
            each["created"],
            _mib(each["num_bytes"]),
            "yes" if each["has_optimizer"] else "no",
        )
        for each in facts["checkpoints"]
    ]
    return _table(("NAME", "STEP", "CREATED", "MIB", "OPTIMIZER"), rows)


def _passed_over_lines(facts: Mapping[str, Any]) -> list[str]:
    passed = [(each["path"].name, _kind(each), each["reason"]) for each in facts["passed_over"]]
    return ["", *_table(("PASSED OVER", "", "WHY"), passed)] if passed else []


def _kind(passed: Mapping[str, Any]) -> str:
    if why_aside(passed["path"].name) is not None:
        return "unfinished"
    return "damaged" if passed["is_damaged"] else "not usable"


def _listed(folder: str) -> Path:
    """Where checkpoints are looked for: of a run, in the folder that it has for them."""
    given = Path(folder)
    return given / CHECKPOINTS_FOLDER if is_run(given) else given


def _show(arguments: argparse.Namespace) -> _Answer:
    about = dmuon.describe_checkpoint(arguments.path)
    settings = None
    if about.optimizer is not None:
        groups = [
            {key: value for key, value in group.items() if key != "names"}
            | {"num_params": len(group.get("names", ()))}
            for group in about.optimizer.param_groups
        ]
        splits = {name: str(split) for name, split in (about.optimizer.splits or {}).items()}
        settings = {
            "num_steps": about.optimizer.num_steps,
            "param_groups": groups,
            "splits": splits,
        }
    facts: dict[str, Any] = {
        "path": about.path,
        "step": about.step,
        "created": _when(about.created),
        "num_bytes": about.num_bytes,
        "versions": about.versions,
        "mesh": about.mesh,
        "files": about.files,
        "sections": {
            name: {"num_tensors": s.num_tensors, "num_bytes": s.num_bytes, "dtypes": s.dtypes}
            for name, s in about.sections.items()
        },
        "tied": about.tied,
        "optimizer": settings,
        "extra": about.extra,
        "unlisted": about.unlisted,
        "problem": about.problem,
    }
    code, complaints = GOOD, []
    if about.problem is not None:
        code, complaints = DIFFERENT, [f"{about.path} is not whole: {about.problem}"]
    return _Answer(facts, _show_lines(facts), code, complaints)


def _show_lines(facts: Mapping[str, Any]) -> list[str]:
    pairs = [
        ("step", str(facts["step"])),
        ("created", facts["created"]),
        ("size", f"{_mib(facts['num_bytes'])} MiB"),
        ("mesh", ", ".join(f"{axis} {size}" for axis, size in facts["mesh"].items())),
        ("written by", ", ".join(f"{name} {v}" for name, v in facts["versions"].items())),
        *(("tied", f"{alias} is {kept}") for alias, kept in facts["tied"].items()),
    ]
    lines = _table((str(facts["path"]), ""), pairs)
    sections = [
        (name, str(s["num_tensors"]), _mib(s["num_bytes"]), ", ".join(s["dtypes"]))
        for name, s in facts["sections"].items()
    ]
    lines += ["", *_table(("SECTION", "TENSORS", "MIB", "TYPES"), sections)]
    files = [(name, _mib(size)) for name, size in facts["files"].items()]
    files += [(name, "not in the manifest") for name in facts["unlisted"]]
    lines += ["", *_table(("FILE", "MIB"), files)]
    settings = facts["optimizer"] or {"param_groups": []}
    for index, group in enumerate(settings["param_groups"]):
        rows = [(str(key), _text(value)) for key, value in group.items()]
        lines += ["", *_table((f"GROUP {index}", ""), rows)]
    if splits := settings.get("splits"):
        lines += ["", *_table(("UPDATED IN PARTS", ""), list(splits.items()))]
    if facts["extra"]:
        extra = [(str(key), _text(value)) for key, value in facts["extra"].items()]
        lines += ["", *_table(("EXTRA", ""), extra)]
    return lines


def _verify(arguments: argparse.Namespace) -> _Answer:
    rows: list[tuple[str, str, str]] = []
    facts: list[dict[str, Any]] = []
    for path in arguments.path:
        # A link and ``.`` say nothing of what is behind them; a link to itself has nothing there.
        found = Path(os.path.realpath(path))
        reason = why_aside(found.name) if found.is_dir() else None
        if reason is not None:  # no run reads it, so its files may be as they are
            rows.append((path, "unfinished", reason))
        else:
            try:
                about = dmuon.verify_checkpoint(path)
                size = f"step {about.step}, {_mib(about.num_bytes)} MiB"
                rows.append((path, "good", size))
            except dmuon.DamagedCheckpointError as error:
                reason = error.reason
                rows.append((path, "damaged", reason))
        facts.append({"path": path, "is_good": reason is None, "reason": reason})
    code = GOOD if all(each["is_good"] for each in facts) else DIFFERENT
    return _Answer({"checkpoints": facts}, _table(("CHECKPOINT", "", ""), rows), code)


def _export(arguments: argparse.Namespace) -> _Answer:
    most = arguments.max_shard_mib * _MIB
    done = dmuon.export_weights(arguments.path, arguments.target, max_shard_bytes=most)
    facts = {
        "path": done.path,
        "files": done.files,
        "num_tensors": done.num_tensors,
        "num_bytes": done.num_bytes,
    }
    rows = [(name, _mib(size)) for name, size in done.files.items()]
    lines = [
        f"{done.num_tensors} weights, {_mib(done.num_bytes)} MiB, written to {done.path} "
        "and read back",
        *_table(("FILE", "MIB"), rows),
    ]
    return _Answer(facts, lines)


def _copy(arguments: argparse.Namespace) -> _Answer:
    source, target = (Place.of(text) for text in (arguments.source, arguments.target))
    done = copy_checkpoint(source, target)
    facts = {
        "source": source.text,
        "target": target.text,
        "step": done.step,
        "files": done.files,
        "kept": done.kept,
    }
    rows = [(name, _mib(size)) for name, size in done.files.items()]
    lines = [
        f"step {done.step}, {_mib(sum(done.files.values()))} MiB, copied to {target.text}",
        *_table(("FILE", "MIB"), rows),
    ]
    return _Answer(facts, lines)


def _diff(arguments: argparse.Namespace) -> _Answer:
    found = dmuon.diff_checkpoints(arguments.a, arguments.b)
    kinds = {
        name: [{"dtype": each.dtype, "shape": each.shape} for each in pair]
        for name, pair in found.other_kind.items()
    }
    facts: dict[str, Any] = {
        "a": found.a,
        "b": found.b,
        "is_same": found.is_same,
        "num_compared": found.num_compared,
        "weights_only": found.weights_only,
        "only_in_a": found.only_in_a,
        "only_in_b": found.only_in_b,
        "other_kind": kinds,
        "values": [
            {
                "name": each.name,
                "num_different": each.num_different,
                "num_values": each.num_values,
                "largest_absolute": each.largest_absolute,
                "largest_relative": each.largest_relative,
            }
            for each in found.values
        ],
        "settings": found.settings,
    }
    return _Answer(facts, _diff_lines(facts), GOOD if found.is_same else DIFFERENT)


def _diff_lines(facts: Mapping[str, Any]) -> list[str]:
    what = "weights" if facts["weights_only"] else "tensors"
    equal = facts["num_compared"] - len(facts["values"])
    lines = [f"{equal} {what} are equal, {len(facts['values'])} differ in their values"]
    only = [(name, "only in A") for name in facts["only_in_a"]]
    only += [(name, "only in B") for name in facts["only_in_b"]]
    kinds = [
        (name, *(f"{each['dtype']} {list(each['shape'])}" for each in pair))
        for name, pair in facts["other_kind"].items()
    ]
    values = [
        (
            each["name"],
            f"{each['num_different']} of {each['num_values']}",
            f"{each['largest_absolute']:.3g}",
            f"{each['largest_relative']:.3g}",
        )
        for each in facts["values"]
    ]
    settings = [(path, _text(a), _text(b)) for path, (a, b) in facts["settings"].items()]
    for head, rows in (
        (("TENSOR", ""), only),
        (("TENSOR", "A", "B"), kinds),
        (("TENSOR", "VALUES", "LARGEST |A-B|", "RELATIVE"), values),
        (("SETTING", "A", "B"), settings),
    ):
        if rows:
            lines += ["", *_table(head, rows[:_MOST_LINES])]
            lines += [f"... and {len(rows) - _MOST_LINES} more"] if len(rows) > _MOST_LINES else []
    return lines


_ACTIONS: dict[str, Callable[[argparse.Namespace], _Answer]] = {
    "list": _list,
    "show": _show,
    "verify": _verify,
    "export": _export,
    "copy": _copy,
    "diff": _diff,
}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return text_table(head, [[_line(cell) for cell in row] for row in rows]).split("\n")


def _line(text: str) -> str:
    """On one line; what a terminal would obey is shown as what it is."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def _when(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):  # no year has it
        return f"{seconds} s"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.2f}"


def _text(value: Any) -> str:
    text = json.dumps(_plain(value), ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _plain(value: Any) -> Any:
    """What JSON holds."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, int | str | None) else str(value)
