"""Whether a training looks sound, with the reasons: what its numbers say about Muon and the run."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import fmean, median

from dmuon_platform.event_facts import number
from dmuon_platform.metric_names import GRADIENT_NORM, TRAIN_LOSS
from dmuon_platform.run_ending import State
from dmuon_platform.run_history import RunHistory
from dmuon_platform.run_story import DROPPED, ROLLED_BACK
from dmuon_platform.update_table import UpdateRow, UpdateTable

ROUNDING = 0.1
"""By which singular values may leave the band of exact arithmetic: bfloat16 moves them by 4 %."""

HALF_THE_DIRECTIONS = math.sqrt(0.5)
"""Orthogonality error of an update in which half of the directions are missing."""

LARGE_CHANGE = 0.25
"""Part of themselves by which weights should not change in a step; a rule of thumb."""

SPIKE = 100.0
"""Times the median, from where on a gradient norm is told."""

UNEVEN = 1.25
"""Work of the busiest owner over the mean, from where on the others wait for long."""

ENOUGH = 20
"""Steps, from where on the loss should have fallen."""

MOST_NAMES = 3


class Grade(IntEnum):
    """How good something looks; the worst is that of the whole."""

    GOOD = 0
    UNKNOWN = 1
    LOOK = 2
    BAD = 3


VERDICTS = {
    Grade.GOOD: "healthy",
    Grade.UNKNOWN: "not enough to judge",
    Grade.LOOK: "worth a look",
    Grade.BAD: "not healthy",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    grade: Grade
    text: str


def findings_of(history: RunHistory, state: State, problem: str | None) -> list[Finding]:
    """Return everything that was looked at, the worst first."""
    found = [
        *_of_ending(state, problem),
        *_of_updates(history),
        *_of_loss(history),
        *_of_gradient(history),
        *_of_steps(history),
        *_of_balance(history),
    ]
    return sorted(found, key=lambda finding: -finding.grade)


def verdict(findings: Sequence[Finding]) -> Grade:
    """Return the worst grade."""
    return max((finding.grade for finding in findings), default=Grade.UNKNOWN)


def grade_of(row: UpdateRow, band: tuple[float, float]) -> Grade:
    """Return how the update of one matrix looks."""
    numbers = row.spectral_norm, row.orthogonality_error, row.update_rms, row.weight_rms
    if not all(map(math.isfinite, numbers)) or row.spectral_norm > band[1] * (1 + ROUNDING):
        return Grade.BAD
    is_low = row.spectral_norm < band[0] * (1 - ROUNDING)
    is_thin = row.orthogonality_error > HALF_THE_DIRECTIONS
    is_large = LARGE_CHANGE < row.update_to_weight < math.inf
    return Grade.LOOK if is_low or is_thin or is_large else Grade.GOOD


def _of_ending(state: State, problem: str | None) -> Iterator[Finding]:
    if state is State.FAILED:
        yield Finding(Grade.BAD, f"The run failed: {problem or 'nobody knows why'}")


def _of_updates(history: RunHistory) -> Iterator[Finding]:
    if history.updates is None:
        yield Finding(
            Grade.UNKNOWN,
            "Nobody has looked at Muon's updates (tracking.update_statistics_every).",
        )
        return
    step, table = history.updates
    yield _of_singular_values(step, table)
    yield _of_directions(step, table)
    yield _of_change(step, table)


def _of_singular_values(step: int, table: UpdateTable) -> Finding:
    low, high = table.band
    norms = {name: row.spectral_norm for name, row in table.rows.items()}
    bad = [name for name, row in table.rows.items() if grade_of(row, table.band) is Grade.BAD]
    if bad:
        return Finding(
            Grade.BAD,
            f"Newton-Schulz does not orthogonalise {_names(bad)}: largest singular value "
            f"{_number(norms[bad[0]])} at step {step}, where it should end at {high:.2f}. Look at "
            "optimizer.ns_dtype and at the gradient norm.",
        )
    idle = [name for name, norm in norms.items() if norm < low * (1 - ROUNDING)]
    if idle:
        return Finding(
            Grade.LOOK,
            f"{_names(idle)} got less than a whole update at step {step}: the gradient is zero, "
            "or too small for float32.",
        )
    return Finding(
        Grade.GOOD,
        f"Newton-Schulz works: the largest singular values of {len(norms)} updates are "
        f"{min(norms.values()):.3f} to {max(norms.values()):.3f} at step {step}; whole updates "
        f"have {low:.2f} to {high:.2f}, give or take {ROUNDING:.0%} of rounding.",
    )


def _of_directions(step: int, table: UpdateTable) -> Finding:
    errors = {name: row.orthogonality_error for name, row in table.rows.items()}
    thin = [name for name, error in errors.items() if error > HALF_THE_DIRECTIONS]
    if thin:
        return Finding(
            Grade.LOOK,
            f"In {_names(thin)} fewer than half of the directions get an update at step {step} "
            f"(orthogonality error up to {max(errors[name] for name in thin):.2f}): the gradient "
            "has next to nothing in the others. Usual in the first steps; later a larger batch "
            "helps.",
        )
    sound = [error for error in errors.values() if math.isfinite(error)]
    if not sound:
        return Finding(Grade.BAD, f"No orthogonality error of step {step} is a number.")
    return Finding(
        Grade.GOOD,
        f"Updates are close to orthogonal: error {fmean(sound):.2f} on average, {max(sound):.2f} "
        f"at most at step {step}; below {HALF_THE_DIRECTIONS:.2f} more than half of the "
        "directions get theirs.",
    )


def _of_change(step: int, table: UpdateTable) -> Finding:
    changes = {name: row.update_to_weight for name, row in table.rows.items()}
    sound = [change for change in changes.values() if math.isfinite(change)]
    large = [name for name, change in changes.items() if LARGE_CHANGE < change < math.inf]
    if large:
        return Finding(
            Grade.LOOK,
            f"{_names(large)} changed by {100 * max(changes[name] for name in large):.0f} % of "
            f"its size in step {step}: optimizer.lr may be too high, or its weights very small.",
        )
    middle = f"{100 * median(sound):.2g} %" if sound else "an unknown part"
    return Finding(Grade.GOOD, f"A matrix changed by {middle} of its size in step {step} (median).")


def _of_loss(history: RunHistory) -> Iterator[Finding]:
    curve = history.curves.get(TRAIN_LOSS)
    if curve is None:
        yield Finding(Grade.UNKNOWN, "No step is done yet.")
        return
    values = list(curve.values)
    if not math.isfinite(values[-1]):
        yield Finding(
            Grade.BAD, f"The training loss is {values[-1]} at step {curve.steps[-1]:.0f}."
        )
        return
    size = max(1, len(values) // 10)
    begin, end = (
        fmean(part) if part else math.nan
        for part in (_finite(values[:size]), _finite(values[-size:]))
    )
    if len(values) < ENOUGH:
        yield Finding(Grade.UNKNOWN, f"{len(values)} steps are too few to judge the loss by.")
    else:
        has_fallen = end < begin
        what = "fell" if has_fallen else "did not fall"
        yield Finding(
            Grade.GOOD if has_fallen else Grade.LOOK,
            f"The training loss {what}: {begin:.3f} on average in the first tenth of the steps, "
            f"{end:.3f} in the last.",
        )


def _of_gradient(history: RunHistory) -> Iterator[Finding]:
    curve = history.curves.get(GRADIENT_NORM)
    if curve is None:
        return
    sound = _finite(curve.values)
    missing = len(curve.values) - len(sound)
    if missing:
        yield Finding(Grade.LOOK, f"The gradient norm was not finite in {missing} steps.")
    if not sound:
        return
    middle, most = median(sound), max(sound)
    if middle and most > SPIKE * middle:
        step = curve.steps[list(curve.values).index(most)]
        yield Finding(
            Grade.LOOK,
            f"The gradient norm was {most:.3g} at step {step:.0f}, {most / middle:.0f} times its "
            f"median of {middle:.3g}.",
        )
    elif not missing:
        yield Finding(
            Grade.GOOD, f"The gradient norm is {middle:.3g} (median), and {most:.3g} at most."
        )


def _of_steps(history: RunHistory) -> Iterator[Finding]:
    again = history.continuation
    if again.different:
        yield Finding(
            Grade.LOOK,
            f"{again.different} of {again.equal + again.different} repeated steps had other "
            "numbers than the first time; on another number of workers they may.",
        )
    elif again.equal:
        yield Finding(
            Grade.GOOD, f"All {again.equal} repeated steps had the same numbers bit for bit."
        )
    for kind, text in {DROPPED: "updates were dropped", ROLLED_BACK: "roll-backs"}.items():
        count = sum(event["kind"] == kind for event in history.events)
        if count:
            yield Finding(Grade.LOOK, f"{count} {text}; `dmuon logs` tells which.")


def _of_balance(history: RunHistory) -> Iterator[Finding]:
    imbalance = number(history.plan, "imbalance")
    if imbalance is not None:
        grade = Grade.LOOK if imbalance > UNEVEN else Grade.GOOD
        text = f"The busiest owner has {imbalance:.3f} times the mean Newton-Schulz work"
        more = "; the others wait for it." if grade is Grade.LOOK else "."
        yield Finding(grade, text + more)


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _names(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    listed = ", ".join(names[:MOST_NAMES])
    return f"{listed} and {more} more" if more > 0 else listed


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else str(value)
