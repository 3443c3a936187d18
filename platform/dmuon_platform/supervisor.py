"""Tries a training again when it fails, and says at the end why it failed first.

Ray retries plain bugs until its budget is gone, and nothing when its controller or the driver's
connection dies. So Ray is told not to retry (`attempts`), and one loop decides here.

Failures are of three sorts. What another attempt would only repeat ends the run: a *final* error,
or the same error raised twice at the same step. Other errors raised by code, and what was *lost*
(processes, machines, the network, storage, a rank that was stuck), are answered by another attempt
out of two budgets, which count failures in a row: a new checkpoint fills them again.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dmuon_platform.causes import Cause
from dmuon_platform.errors import FatalError, PlatformError
from dmuon_platform.event_facts import whole
from dmuon_platform.spec.faults import FaultsSpec

T = TypeVar("T")

LONGEST_PAUSE_S = 60.0
"""Before another attempt; it starts with none, then 1 s, doubled with every failure in a row."""


@dataclass(frozen=True)
class Planned:
    """An attempt ended with a checkpoint so that another one can go on with other workers."""

    reason: str


@dataclass(frozen=True)
class Failure:
    """One failed attempt.

    Attributes:
        attempt: Its number.
        step: Steps done by then.
        saved: Steps done at the newest checkpoint by then.
        cause: Why.
    """

    attempt: int
    step: int
    saved: int
    cause: Cause


class Supervisor:
    """Decides after every failure whether there is another attempt.

    Args:
        faults: The budgets.
        earlier: Failures of a launch that did not come to its end, so that it goes on.
    """

    def __init__(self, faults: FaultsSpec, earlier: Iterable[Failure] = ()) -> None:
        self._faults = faults
        self._failures = list(earlier)

    def run(
        self,
        run_attempt: Callable[[], tuple[int, T | Cause | Planned]],
        steps: Callable[[], tuple[int, int]],
        on_restart: Callable[[Failure], None],
        pause: Callable[[float], None],
    ) -> T:
        """Run attempts until one succeeds, is final, repeats itself, or a budget is gone.

        Args:
            run_attempt: Does one attempt; returns its number, and its result or why it ended.
            steps: How many are done, and how many saved, at the moment of a failure.
            on_restart: Told of every failure that is answered by another attempt.
            pause: Waits for some seconds.

        Raises:
            PlatformError: With the first cause on top.
        """
        while True:
            attempt, outcome = run_attempt()
            if isinstance(outcome, Planned):
                continue
            if not isinstance(outcome, Cause):
                return outcome
            if outcome.final is not None:
                raise outcome.final
            self._failures.append(Failure(attempt, *steps(), outcome))
            self._give_up_if_hopeless()
            on_restart(self._failures[-1])
            pause(pause_s(len(self._in_a_row())))

    def _in_a_row(self) -> list[Failure]:
        """Return the failures since the newest checkpoint was made."""
        return [each for each in self._failures if each.saved >= self._failures[-1].saved]

    def _give_up_if_hopeless(self) -> None:
        last = self._failures[-1]
        for earlier in self._failures[:-1]:
            # What is lost twice may be bad luck; the same error raised twice is a bug.
            same = earlier.cause.summary == last.cause.summary and earlier.step == last.step
            if same and not last.cause.is_loss and not last.cause.may_repeat:
                raise FatalError(
                    f"{last.cause.summary}\nThis happened twice at the same place (after step "
                    f"{last.step}), so another attempt would not help.\n{last.cause.details}"
                )
        in_a_row = self._in_a_row()
        num_same = sum(each.cause.is_loss == last.cause.is_loss for each in in_a_row)
        name = "max_losses" if last.cause.is_loss else "max_failures"
        limit = self._faults.max_losses if last.cause.is_loss else self._faults.max_failures
        if num_same > limit:
            raise PlatformError(_last_words(in_a_row, f"faults.{name} = {limit}"))


def pause_s(num_in_a_row: int) -> float:
    """Return how long to wait before another attempt, after so many failures in a row."""
    return 0.0 if num_in_a_row < 2 else min(LONGEST_PAUSE_S, 2.0 ** (num_in_a_row - 2))


def unfinished_failures(events: Iterable[Mapping[str, Any]]) -> list[Failure]:
    """Return the failures of the last launch in a journal, if that did not come to its end.

    Then somebody has killed the driver, and the next one goes on for it.
    """
    failures: list[Failure] = []
    for event in events:
        if event["kind"] in ("launched", "ended"):
            failures.clear()
        elif event["kind"] == "restarted" and (failure := _failure_of(event)) is not None:
            failures.append(failure)
    return failures


def _failure_of(event: Mapping[str, Any]) -> Failure | None:
    """Return what was written down as a failure; None where a fact of it is not there."""
    attempt, step, saved = (whole(event, key) for key in ("attempt", "step", "saved"))
    is_loss = event.get("is_loss")
    if attempt is None or step is None or saved is None or not isinstance(is_loss, bool):
        return None
    cause = Cause(str(event.get("cause")), str(event.get("details", "")), is_loss=is_loss)
    return Failure(attempt, step, saved, cause)


def _last_words(failures: list[Failure], budget: str) -> str:
    first, *rest = failures
    others = "".join(
        f"\n  attempt {f.attempt}, after step {f.step}: {f.cause.summary}" for f in rest
    )
    return (
        f"{first.cause.summary}\nThe run failed {len(failures)} times without a new checkpoint and "
        f"gave up ({budget}); that was the first cause, in attempt {first.attempt} after step "
        f"{first.step}." + (f" Then:{others}" if others else "") + f"\n{first.cause.details}"
    )
