"""Which checkpoints of a run stay on disk: a pure function of what is there."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from dmuon_platform.spec.checkpoint import CheckpointSpec


@dataclass(frozen=True)
class Candidate:
    """What the decision depends on."""

    path: Path
    """Its folder."""
    step: int
    """Optimizer steps done."""
    evaluation_loss: float | None
    """Of the evaluation after that step; None without one."""


def kept(
    candidates: Sequence[Candidate], rule: CheckpointSpec, is_whole: Callable[[Path], bool]
) -> set[Path]:
    """Return the folders that stay: the newest, every so many steps, and the best.

    Args:
        candidates: In any order.
        rule: Section ``checkpoint`` of the job.
        is_whole: Asked about few: what is damaged does not count among the newest or the best.
    """

    def first(number: int, ordered: Iterable[Candidate]) -> set[Path]:
        return set(islice(filter(is_whole, (each.path for each in ordered)), number))

    newest_first = sorted(candidates, key=lambda each: each.step, reverse=True)
    keep = first(rule.keep_last, newest_first)
    if rule.keep_every is not None:
        keep |= {each.path for each in newest_first if each.step % rule.keep_every == 0}
    losses = [(loss, each) for each in newest_first if (loss := each.evaluation_loss) is not None]
    losses.sort(key=lambda pair: pair[0])  # of equal ones the newest comes first
    return keep | first(rule.keep_best, (each for _, each in losses))
