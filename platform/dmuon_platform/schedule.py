"""The learning rate of a step, as a factor on what the optimizer was given."""

import math
from typing import Protocol


class ScheduleSettings(Protocol):
    """The fields of ``spec.schedule``."""

    @property
    def kind(self) -> str:
        """``"constant"``, ``"cosine"`` or ``"wsd"``: what follows the warm-up."""

    @property
    def warmup_steps(self) -> int:
        """Steps of linear rise from near zero; the step after them has the full rate."""

    @property
    def decay_steps(self) -> int | None:
        """Steps of the final fall of ``"wsd"``; None for a fifth of all."""

    @property
    def min_ratio(self) -> float:
        """What ``"cosine"`` and ``"wsd"`` fall to, reached just after the last step.

        So that no step is wasted on a rate of zero.
        """


def lr_multiplier(settings: ScheduleSettings, num_steps: int, step: int) -> float:
    """Return the factor for ``step``, counted from 0 to ``num_steps - 1``; a pure function.

    Linear warm-up over the first ``warmup_steps``, then ``constant``; or ``cosine`` (Loshchilov
    and Hutter 2016, arXiv 1608.03983) down to ``min_ratio``; or ``wsd``, which stays at one and
    falls linearly in the end (Hu et al. 2024, arXiv 2404.06395).
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if settings.kind == "constant":
        return 1.0
    if settings.kind == "cosine":
        falling, start = num_steps - warmup, warmup
    elif settings.kind == "wsd":
        falling = _wsd_decay(settings, num_steps)
        start = num_steps - falling
    else:
        raise ValueError(f"schedule.kind is constant, cosine or wsd, not {settings.kind!r}")
    return _fall(settings, _progress(step, start, falling))


def _wsd_decay(settings: ScheduleSettings, num_steps: int) -> int:
    wanted = settings.decay_steps
    if wanted is None:
        wanted = math.ceil(num_steps / 5)
    return min(wanted, max(0, num_steps - settings.warmup_steps))


def _progress(step: int, start: int, length: int) -> float:
    """Return how far the fall has come: 0 at ``start``, and 1 just after its last step."""
    return min(1.0, max(0.0, (step - start) / length)) if length else 0.0


def _fall(settings: ScheduleSettings, progress: float) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    height = cosine if settings.kind == "cosine" else 1 - progress
    return settings.min_ratio + (1 - settings.min_ratio) * height
