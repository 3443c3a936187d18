"""Tries a training again when it fails, and says at the end why it failed first.

Ray retries plain bugs until its budget is gone, and nothing when its controller or the driver's
connection dies. So Ray is told not to retry (`launch.trainer`), and one loop decides here.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dmuon_platform.errors import (
    Diverged,
    FatalError,
    GracefulStop,
    PlatformError,
    SpecError,
)

T = TypeVar("T")

FINAL = (Diverged, FatalError, GracefulStop, SpecError)
"""Errors that another attempt would only repeat."""

COLLATERAL = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|timed? ?out|broken pipe|Rank 0 failed", re.I
)
"""What the other ranks say when one of them is gone."""


@dataclass(frozen=True)
class Cause:
    """Why one attempt ended: plain text, and the error itself when it must not be retried."""

    summary: str
    details: str
    died: bool = False
    """A process is gone, rather than an error raised by the code."""
    final: PlatformError | None = None


@dataclass(frozen=True)
class Failure:
    """One failed attempt, and how many steps were done by then."""

    attempt: int
    step: int
    cause: Cause


def supervise(
    run_attempt: Callable[[], tuple[int, T | Cause]],
    steps_done: Callable[[], int],
    max_failures: int,
    on_restart: Callable[[Failure], None],
) -> T:
    """Run attempts until one succeeds, is final, repeats itself, or the budget is gone.

    Args:
        run_attempt: Does one attempt; returns its number, and its result or why it failed.
        steps_done: How far the run has come, at the moment of a failure.
        max_failures: How many failures are answered by another attempt.
        on_restart: Told of every failure that is answered by another attempt.

    Raises:
        PlatformError: With the first cause on top.
    """
    failures: list[Failure] = []
    while True:
        attempt, outcome = run_attempt()
        if not isinstance(outcome, Cause):
            return outcome
        if outcome.final is not None:
            raise outcome.final
        failures.append(Failure(attempt, steps_done(), outcome))
        _give_up_if_hopeless(failures, max_failures)
        on_restart(failures[-1])


def _give_up_if_hopeless(failures: list[Failure], max_failures: int) -> None:
    last = failures[-1]
    for earlier in failures[:-1]:
        # A process that dies twice may be bad luck; the same error raised twice is a bug.
        same = earlier.cause.summary == last.cause.summary and earlier.step == last.step
        if same and not last.cause.died:
            raise FatalError(
                f"{last.cause.summary}\nThis happened twice at the same place (after step "
                f"{last.step}), so another attempt would not help.\n{last.cause.details}"
            )
    if len(failures) > max_failures:
        first, *rest = failures
        others = "".join(
            f"\n  attempt {f.attempt}, after step {f.step}: {f.cause.summary}" for f in rest
        )
        raise PlatformError(
            f"{first.cause.summary}\nThe run failed {len(failures)} times and gave up "
            f"(faults.max_failures = {max_failures}); that was the first cause, in attempt "
            f"{first.attempt} after step {first.step}."
            + (f" Then:{others}" if others else "")
            + f"\n{first.cause.details}"
        )


def cause_of(error: BaseException) -> Cause:
    """Find in what Ray raised the thing that happened first."""
    workers: dict[int, Exception] = getattr(error, "worker_failures", {})
    if not workers:
        inner = getattr(error, "controller_failure", error)
        return Cause(_one_line(inner), str(error), died=_is_death(inner), final=_final(inner))
    rank = min(workers, key=lambda rank: (_rank_of_blame(workers[rank]), rank))
    guilty = workers[rank]
    if _is_death(guilty):
        text = f"The worker process of rank {rank} died (killed, out of memory, or its machine)."
        return Cause(text, str(getattr(guilty, "health_check_failure", guilty)), died=True)
    return Cause(f"Rank {rank}: {_one_line(guilty)}", str(error), final=_final(guilty))


def _final(error: BaseException) -> PlatformError | None:
    return error if isinstance(error, FINAL) else None


def _rank_of_blame(error: Exception) -> int:
    if isinstance(error, FINAL):
        return 0
    if _is_death(error):
        return 1
    return 3 if COLLATERAL.search(str(error)) else 2


def _is_death(error: Any) -> bool:
    names = {base.__name__ for base in type(error).__mro__}
    return bool(names & {"RayActorError", "WorkerHealthCheckFailedError", "NodeDiedError"})


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")
