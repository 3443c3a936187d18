"""Section ``schedule``: the learning rates over the steps."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeInt

from dmuon_platform.spec.problem import Problem
from dmuon_platform.spec.section import Section


class ScheduleSpec(Section):
    """A factor on all learning rates: a linear warm-up, then what ``kind`` says."""

    kind: Literal["constant", "cosine", "wsd"] = "constant"
    """What follows the warm-up: nothing, a cosine to the end, or a linear fall at the end."""

    warmup_steps: NonNegativeInt = 0
    """Steps of linear rise."""

    decay_steps: NonNegativeInt | None = None
    """Steps of the final fall of ``wsd``; none for a fifth of all."""

    min_ratio: float = Field(0.0, ge=0, le=1)
    """The factor that ``cosine`` and ``wsd`` end with."""

    def problems(self) -> Iterator[Problem]:
        """Yield settings that the kind does not use."""
        unused = {
            "decay_steps": self.kind != "wsd" and self.decay_steps is not None,
            "min_ratio": self.kind == "constant" and self.min_ratio > 0,
        }
        for key in (key for key, is_unused in unused.items() if is_unused):
            user = "wsd" if key == "decay_steps" else "cosine"
            yield Problem(
                f"schedule.{key}",
                f"has no effect with schedule.kind = {self.kind!r}",
                f"remove it, or set schedule.kind = {user!r}",
                reads=("schedule.kind",),
            )
