"""Section ``faults``: what the run does when something breaks."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from dmuon_platform.spec.fault import InjectedFault
from dmuon_platform.spec.problem import Problem
from dmuon_platform.spec.section import Section

LONGEST_S = 1e9
"""For what must end at some time: some 30 years, which clocks and timeouts can still take."""


class LossSpike(Section):
    """When a loss counts as a spike."""

    factor: float = Field(gt=1, examples=[2.0])
    """Above so many times the median loss of the ``window``."""

    window: PositiveInt = 50
    """Steps before it, all of which must be there."""


class FaultsSpec(Section):
    """How much is tried before the run gives up."""

    max_failures: NonNegativeInt = 3
    """Errors raised by code that are answered by another attempt, in a row: a new checkpoint makes
    the count start again."""

    max_losses: NonNegativeInt = 20
    """The same for what is lost: processes, machines, the network, storage, ranks that are
    stuck."""

    timeout_s: Annotated[float, Field(ge=1, le=LONGEST_S)] = 300
    """Seconds a collective may take before its worker counts as lost."""

    stall_s: Annotated[float, Field(ge=1, le=LONGEST_S)] = 240
    """Seconds without a micro-batch, or a batch of evaluation, after which a rank is stuck; and
    without a sign of Ray's controller, which steers them, after which that is lost."""

    slow_stall_s: Annotated[float, Field(ge=1, le=LONGEST_S)] = 1800
    """The same while starting, saving and ending, and the first time in each phase of a step,
    which may compile."""

    grace_s: PositiveFloat = 45
    """Seconds between a request to stop and the end of the training, with a checkpoint if there is
    time for it. Whoever kills afterwards should wait some 15 more: the tracker hears of it too."""

    grow_after_s: NonNegativeFloat = 60
    """Seconds that room for more workers must have been there before the run takes them."""

    node_wait_s: NonNegativeFloat = 600
    """Seconds to wait for room for the fewest workers, and for a cluster that is gone."""

    non_finite: Literal["stop", "skip", "roll_back"] = "stop"
    """What follows an infinite loss or gradient, or one that is not a number: the run ends with
    exit code 86; or the update of that step is dropped; or the run goes back to the newest good
    checkpoint and leaves out the samples from there to that step."""

    max_skips: PositiveInt = 5
    """Updates dropped one after another, or roll-backs to the same checkpoint, after which the
    next one ends the run."""

    loss_spike: LossSpike | None = None
    """A finite loss that is answered by a roll-back too: ``{factor = 2.0, window = 50}``."""

    inject: Annotated[tuple[InjectedFault, ...], Field(strict=False)] = ()
    """Faults to be made on purpose: ``[{kind = "kill", step = 10, rank = 1}]``. Each happens once
    in a run, whatever is started again."""

    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong with a fault, and those that are there twice."""
        labels = [fault.label for fault in self.inject]
        for fault in self.inject:
            yield from fault.problems()
        for label in sorted({label for label in labels if labels.count(label) > 1}):
            yield Problem(
                "faults.inject", f"{label} is there {labels.count(label)} times", "write times = 2"
            )
