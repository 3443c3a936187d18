"""Section ``faults``: what the run does when something breaks."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat

from dmuon_platform.spec.section import Section


class FaultsSpec(Section):
    """How much is tried before the run gives up."""

    max_failures: NonNegativeInt = 3
    """Failures that are answered by another attempt."""

    timeout_s: PositiveFloat = 300
    """Seconds a collective may take before its worker counts as lost."""

    non_finite: Literal["stop"] = "stop"
    """What follows an infinite loss or gradient, or one that is not a number."""
