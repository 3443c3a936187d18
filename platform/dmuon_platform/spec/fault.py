"""One fault of ``faults.inject``: what breaks, in which step, on which rank."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Discriminator, Field, PositiveFloat, PositiveInt, Tag

from dmuon_platform.spec.problem import Problem
from dmuon_platform.spec.section import Section


class FaultKind(StrEnum):
    """What can be made to break. Each is the real thing: a signal, an error of the kernel."""

    KILL = "kill"
    """SIGKILL to the rank's process."""

    RAISE = "raise"
    """An error raised by the rank's code."""

    FREEZE = "freeze"
    """SIGSTOP to the rank's process: nothing in it runs any more."""

    STALL = "stall"
    """The rank's data loader blocks, for ``seconds`` or for ever."""

    SLOW = "slow"
    """The rank takes ``seconds`` longer for the step, and is otherwise well."""

    NAN = "nan"
    """The rank's loss, and so its gradient, is not a number."""

    INF = "inf"
    """The same with infinity."""

    SPIKE = "spike"
    """The rank's loss and gradient are ``factor`` times what they are."""

    SIGTERM = "sigterm"
    """SIGTERM to the rank's process, as before a preemption: the run saves and ends with 75."""

    SAVE_ERROR = "save_error"
    """The kernel refuses what the rank writes of a checkpoint (EFBIG), for that one save."""

    KILL_DURING_SAVE = "kill_during_save"
    """SIGKILL to the rank's process when files of a checkpoint are there and not committed."""

    CORRUPT_CHECKPOINT = "corrupt_checkpoint"
    """One byte of the newest committed checkpoint is flipped, then SIGKILL."""

    KILL_CONTROLLER = "kill_controller"
    """SIGKILL to the process in which Ray steers the workers; on that machine."""


IN_A_SAVE = frozenset({FaultKind.SAVE_ERROR, FaultKind.KILL_DURING_SAVE})
"""Kinds that strike in the first save of a checkpoint after ``step`` steps or more."""

ON_ONE_RANK = frozenset({FaultKind.CORRUPT_CHECKPOINT, FaultKind.KILL_CONTROLLER})
"""Kinds that hit something there is one of."""

EVERY_RANK = "all"


def _one_or_all(value: object) -> str | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return "one-rank"
    return "every-rank" if value == EVERY_RANK else None


class InjectedFault(Section):
    """Something that is made to break, to see the run survive it."""

    kind: Annotated[FaultKind, Field(strict=False, examples=["kill"])]
    """What breaks."""

    step: PositiveInt = Field(examples=[10])
    """In which step, counted from 1 as in the metrics; for faults of saves and checkpoints, from
    which step on."""

    rank: Annotated[
        Annotated[int, Field(ge=0), Tag("one-rank")] | Annotated[Literal["all"], Tag("every-rank")],
        Discriminator(
            _one_or_all,
            custom_error_type="one_or_all",
            custom_error_message='must be a rank from 0, or "all"',
        ),
    ] = 0
    """On which rank, or ``"all"``."""

    times: PositiveInt = 1
    """How often in the whole run: with 2 it strikes again when the step is done again."""

    seconds: PositiveFloat | None = None
    """How long ``slow`` and ``stall`` last; a stall without it lasts until somebody ends it."""

    factor: PositiveFloat | None = None
    """What ``spike`` multiplies the loss with."""

    @property
    def label(self) -> str:
        """A name of its own among the faults of a job."""
        return f"{self.kind}-step-{self.step}-rank-{self.rank}"

    def strikes(self, rank: int) -> bool:
        """Tell whether it is meant for a rank."""
        return self.rank in (rank, EVERY_RANK)

    def problems(self) -> Iterator[Problem]:
        """Yield what does not go with its kind."""
        yield from self._problems_with("seconds", {FaultKind.SLOW}, {FaultKind.STALL})
        yield from self._problems_with("factor", {FaultKind.SPIKE}, set())
        if self.rank == EVERY_RANK and self.kind in ON_ONE_RANK:
            yield Problem(
                "faults.inject.rank", f'{self.kind} happens once, not on "all"', "write rank = 0"
            )

    def _problems_with(
        self, key: str, needed_by: set[FaultKind], taken_by: set[FaultKind]
    ) -> Iterator[Problem]:
        is_there = getattr(self, key) is not None
        if self.kind in needed_by and not is_there:
            yield Problem(
                f"faults.inject.{key}", f"is required by {self.kind}", f"write {key} = 2.0, say"
            )
        if is_there and self.kind not in needed_by | taken_by:
            takers = " and ".join(sorted(needed_by | taken_by))
            yield Problem(
                f"faults.inject.{key}", f"is for {takers}, not for {self.kind}", f"remove {key}"
            )
