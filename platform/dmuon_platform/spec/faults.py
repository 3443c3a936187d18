"""Section ``faults``: what the run does when something breaks."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from dmuon_platform.spec.section import Section


class FaultsSpec(Section):
    """How much is tried before the run gives up."""

    max_failures: NonNegativeInt = 3
    """Errors raised by code that are answered by another attempt, in a row: a new checkpoint makes
    the count start again."""

    max_losses: NonNegativeInt = 20
    """The same for what is lost: processes, machines, the network, storage, ranks that are
    stuck."""

    timeout_s: PositiveFloat = 300
    """Seconds a collective may take before its worker counts as lost."""

    stall_s: PositiveFloat = 240
    """Seconds without a micro-batch, or a batch of evaluation, after which a rank is stuck."""

    slow_stall_s: PositiveFloat = 1800
    """The same while starting, saving and ending, and the first time in each phase of a step,
    which may compile."""

    grace_s: PositiveFloat = 45
    """Seconds between a request to stop and the end of the training, with a checkpoint if there is
    time for it. Whoever kills afterwards should wait some 15 more: the tracker hears of it too."""

    grow_after_s: NonNegativeFloat = 60
    """Seconds that room for more workers must have been there before the run takes them."""

    node_wait_s: NonNegativeFloat = 600
    """Seconds to wait for room for the fewest workers, and for a cluster that is gone."""

    non_finite: Literal["stop"] = "stop"
    """What follows an infinite loss or gradient, or one that is not a number."""
