"""Whether what a step has computed may be applied: decided from numbers equal on all ranks."""

import math
from collections import deque
from collections.abc import Iterable
from enum import Enum, auto
from statistics import median

from dmuon_platform.errors import Diverged
from dmuon_platform.spec.faults import FaultsSpec


class Verdict(Enum):
    """What becomes of the update of a step."""

    APPLY = auto()
    DROP = auto()
    """The weights stay as they are, and the next step follows."""
    ROLL_BACK = auto()
    """The weights stay as they are until those of a checkpoint are there."""


class Stability:
    """Judges the steps of one training, in their order.

    Args:
        faults: What follows what.
        losses: Of the applied steps before, oldest first.
        num_dropped: Updates dropped one after another, just before.
    """

    def __init__(
        self, faults: FaultsSpec, losses: Iterable[float] = (), num_dropped: int = 0
    ) -> None:
        self._faults = faults
        spike = faults.loss_spike
        self._losses = deque(losses, maxlen=0 if spike is None else spike.window)
        self._num_dropped = num_dropped

    def judge(self, step: int, loss: float, grad_norm: float) -> Verdict:
        """Decide about a step, counted from 0. The same on all ranks, given the same numbers.

        Raises:
            Diverged: The run should stop, or has dropped enough.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return self._judge_non_finite(step, loss, grad_norm)
        if self._is_spike(loss):
            return Verdict.ROLL_BACK
        self._losses.append(loss)
        self._num_dropped = 0
        return Verdict.APPLY

    def _judge_non_finite(self, step: int, loss: float, grad_norm: float) -> Verdict:
        policy, limit = self._faults.non_finite, self._faults.max_skips
        if policy == "roll_back":
            return Verdict.ROLL_BACK
        if policy == "skip" and self._num_dropped < limit:
            self._num_dropped += 1
            return Verdict.DROP
        why = f" as {limit} before it (faults.max_skips)" if policy == "skip" else ""
        raise diverged(step, loss, grad_norm, why)

    def _is_spike(self, loss: float) -> bool:
        spike = self._faults.loss_spike
        if spike is None or len(self._losses) < spike.window:
            return False
        return loss > spike.factor * median(self._losses)


def diverged(step: int, loss: float, grad_norm: float, why: str = "") -> Diverged:
    """Return the error with which a run ends at a step, counted from 0."""
    return Diverged(
        f"Step {step + 1} diverged{why}: loss {loss}, gradient norm {grad_norm}. Nothing of this "
        "step was applied or saved; the newest checkpoint is from before it. Lower optimizer.lr or "
        "optimizer.adamw_lr, lengthen schedule.warmup_steps, or set train.clip_grad_norm."
    )
