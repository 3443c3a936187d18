"""The tables of a report, as pieces of HTML in which everything that a run says is escaped."""

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dmuon_platform.event_facts import clock
from dmuon_platform.health import Finding, Grade, grade_of
from dmuon_platform.run_history import PER_OWNER, RunHistory
from dmuon_platform.training_starts import TrainingStart
from dmuon_platform.update_table import UpdateRow

MOST_MATRICES = 300
MOST_OWNERS = 32
MOST_STARTS = 100

MIB = 2**20

MARKS = {
    Grade.GOOD: "good",
    Grade.UNKNOWN: "unknown",
    Grade.LOOK: "look",
    Grade.BAD: "bad",
}
"""Also the names of their colours."""

_PLACE = re.compile(r"(\[\d+\])?(:\d+)?$")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: str) -> str:
    """Return a table whose cells are HTML.

    Args:
        header: Of the columns.
        rows: Of cells, escaped.
        numbers: A letter a column: ``n`` for one of numbers, anything else for words.
    """
    kinds = [' class="number"' if kind == "n" else "" for kind in numbers]
    head = "".join(
        f"<th{kind}>{escape(cell)}</th>" for cell, kind in zip(header, kinds, strict=True)
    )
    lines = "\n".join(_line(row, kinds) for row in rows)
    return f'<div class="card wide"><table><tr>{head}</tr>{lines}</table></div>'


def _line(cells: Sequence[str], kinds: Sequence[str]) -> str:
    pairs = zip(cells, kinds, strict=True)
    return "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in pairs) + "</tr>"


def facts_table(facts: Mapping[str, str]) -> str:
    """Return what a run is, by label."""
    rows = [f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in facts.items()]
    return f'<div class="card wide"><table>{"".join(rows)}</table></div>'


def findings_list(findings: Sequence[Finding]) -> str:
    """Return what was looked at, each with how it looks in a word and in a colour."""
    lines = [
        f'<li><b class="{MARKS[each.grade]}">{MARKS[each.grade]}</b>{escape(each.text)}</li>'
        for each in findings
    ]
    return f'<ul class="card findings">{"".join(lines)}</ul>'


def starts_table(starts: Sequence[TrainingStart]) -> str:
    """Return when the training began, each time, why again, and how it ended."""
    rows = [
        [
            str(number),
            clock(start.time),
            "?" if start.step is None else str(start.step),
            "?" if start.num_workers is None else str(start.num_workers),
            escape(start.began),
            escape(start.ended or "?"),
        ]
        for number, start in enumerate(starts, start=1)
    ]
    shown = rows[-MOST_STARTS:]
    note = _left_out(len(shown), len(rows), "starts, the newest")
    header = ("", "time", "from step", "workers", "began", "ended")
    return table(header, shown, "n.nn..") + note


def owners_table(plan: Mapping[str, Any]) -> str:
    """Return who owns how much; of many owners the busiest."""
    if any(key not in plan for key in PER_OWNER):
        return ""
    costs, sizes, counts = (plan[key] for key in PER_OWNER)
    mean = sum(costs) / len(costs) or 1
    owners = sorted(range(len(costs)), key=lambda owner: -costs[owner])[:MOST_OWNERS]
    if len(costs) <= MOST_OWNERS:
        owners.sort()
    rows = [
        [
            str(owner),
            str(counts[owner]),
            f"{sizes[owner] / MIB:,.1f}",
            f"{costs[owner] / 1e9:,.3f}",
            f"{costs[owner] / mean:.3f}",
        ]
        for owner in owners
    ]
    header = ("owner rank", "matrices", "MiB of weights and momentum")
    more = ("GFLOP of Newton-Schulz a step", "over the mean")
    note = _left_out(len(rows), len(costs), "owners, the busiest")
    return table((*header, *more), rows, "nnnnn") + note


def matrices_table(run: RunHistory) -> str:
    """Return the newest look at the updates, matrix by matrix; of very many the worst."""
    if run.updates is None:
        return ""
    _, found = run.updates
    names = sorted(found.rows, key=_natural)
    if len(names) > MOST_MATRICES:
        names.sort(key=lambda name: _badness(found.rows[name], found.band))
    owners = _owners(run.plan)
    rows = [_row(name, found.rows[name], found.band, owners) for name in names[:MOST_MATRICES]]
    header = ("matrix", "shape", "owner", "spectral norm", "orthogonality error")
    more = ("update RMS", "weight RMS", "update / weight", "")
    note = _left_out(len(rows), len(names), "matrices, the worst")
    return table((*header, *more), rows, ".nnnnnnn.") + note


def _row(
    name: str, row: UpdateRow, band: tuple[float, float], owners: Mapping[str, object]
) -> list[str]:
    owner = owners.get(name, owners.get(_PLACE.sub("", name), "?"))
    mark = MARKS[grade_of(row, band)]
    return [
        f'<span class="name">{escape(name)}</span>',
        f"{row.rows} x {row.columns}",
        escape(str(owner)),
        f"{row.spectral_norm:.3f}",
        f"{row.orthogonality_error:.3f}",
        f"{row.update_rms:.3g}",
        f"{row.weight_rms:.3g}",
        f"{row.update_to_weight:.3g}",
        f'<span class="{mark}">{mark}</span>',
    ]


def _owners(plan: Mapping[str, Any]) -> dict[str, object]:
    matrices = plan.get("matrices")
    known = (
        [each for each in matrices if isinstance(each, dict)] if isinstance(matrices, list) else []
    )
    return {str(each.get("name")): each.get("owner", "?") for each in known}


def _badness(row: UpdateRow, band: tuple[float, float]) -> tuple[int, float]:
    error = row.orthogonality_error
    return -grade_of(row, band), -error if math.isfinite(error) else -math.inf


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort layer 10 after layer 2."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _left_out(shown: int, there: int, what: str) -> str:
    if shown == there:
        return ""
    return f'<p class="soft">Shown are {shown:,} of {there:,} {what}.</p>'
