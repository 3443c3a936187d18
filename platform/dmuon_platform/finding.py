"""What ``dmuon doctor`` says of one thing."""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How it stands with something."""

    GOOD = "ok"
    POOR = "poor"
    """A training runs, and would run better otherwise."""
    BROKEN = "broken"
    """A training that needs it does not run."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        about: What it is.
        state: How it stands with it.
        seen: What was found.
        fix: What to do about it; empty when it is good.
    """

    about: str
    state: State
    seen: str
    fix: str = ""
