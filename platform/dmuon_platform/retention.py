"""Which checkpoints of a run stay on disk: a pure function of what is there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from dmuon_platform.spec.checkpoint import CheckpointSpec


class Candidate(Protocol):
    """What the decision depends on."""

    @property
    def path(self) -> Path:
        """Its folder."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""

    @property
    def evaluation_loss(self) -> float | None:
        """Of the evaluation after that step; None without one."""


def kept(candidates: Sequence[Candidate], rule: CheckpointSpec) -> set[Path]:
    """Return the folders that stay: the newest, every so many steps, and the best.

    Args:
        candidates: Whole checkpoints, in any order.
        rule: Section ``checkpoint`` of the job.
    """
    newest_first = sorted(candidates, key=lambda each: each.step, reverse=True)
    keep = {each.path for each in newest_first[: rule.keep_last]}
    if rule.keep_every is not None:
        keep |= {each.path for each in newest_first if each.step % rule.keep_every == 0}
    losses = [
        (loss, each.path) for each in newest_first if (loss := each.evaluation_loss) is not None
    ]
    losses.sort(key=lambda pair: pair[0])  # of equal ones the newest comes first
    return keep | {path for _, path in losses[: rule.keep_best]}
