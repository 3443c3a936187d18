"""Section ``checkpoint``: how often the run is saved, and what is kept."""

from collections.abc import Iterator

from pydantic import NonNegativeInt, PositiveInt

from dmuon_platform.spec.problem import Problem
from dmuon_platform.spec.section import Section


class CheckpointSpec(Section):
    """Always after the last step, and along the way; written while the training goes on."""

    every: PositiveInt = 100
    """Steps between two checkpoints: at most this much work is lost."""

    keep_last: PositiveInt = 3
    """Checkpoints that stay on disk, newest first."""

    keep_every: PositiveInt | None = None
    """Steps, a multiple of ``every``: checkpoints after a multiple of them stay for ever; none for
    no such checkpoints."""

    keep_best: NonNegativeInt = 0
    """Checkpoints that stay for their ``evaluation/loss``, the lowest first; those without an
    evaluation after the same step do not count."""

    def problems(self) -> Iterator[Problem]:
        """Yield steps to keep on which no checkpoint falls."""
        if self.keep_every is not None and self.keep_every % self.every:
            multiple = -(-self.keep_every // self.every) * self.every
            yield Problem(
                "checkpoint.keep_every",
                f"{self.keep_every} is not a multiple of checkpoint.every = {self.every}, so some "
                "of these steps have no checkpoint",
                f"write keep_every = {multiple}, say",
                reads=("checkpoint.every",),
            )
