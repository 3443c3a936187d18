"""A random schedule of faults for one run: a pure function of the job, a seed and a round."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from dmuon_platform.spec import JobSpec, job_of
from dmuon_platform.spec.fault import FaultKind, InjectedFault

HARMLESS = tuple(
    kind for kind in FaultKind if kind not in (FaultKind.NAN, FaultKind.INF, FaultKind.SPIKE)
)
"""Kinds after which a run must come to the weights of one that nothing happened to."""

KILL_DRIVER = "kill_driver"
"""SIGKILL to the process of ``dmuon run``; done from outside, so no kind of ``faults.inject``."""

SLOW_S = 2.0


@dataclass(frozen=True)
class ChaosSchedule:
    """What happens to one run.

    Attributes:
        inject: As in the job's ``faults.inject``.
        driver_kills: Steps done at which the driver is killed.
    """

    inject: tuple[InjectedFault, ...]
    driver_kills: tuple[int, ...]

    @classmethod
    def draw(cls, spec: JobSpec, seed: int, round_number: int, num_faults: int) -> "ChaosSchedule":
        """Draw so many faults, no kind twice before all have come, in different steps."""
        chance = random.Random(f"{seed} {round_number}")
        kinds = _kinds(spec, chance, num_faults)
        _, workers = spec.resources.bounds
        steps = sorted(chance.sample(range(2, spec.num_steps + 1), len(kinds)))
        chosen = list(zip(kinds, steps, strict=True))
        inject = tuple(
            InjectedFault(
                kind=FaultKind(kind),
                step=step,
                rank=chance.randrange(workers),
                seconds=SLOW_S if kind == FaultKind.SLOW else None,
            )
            for kind, step in chosen
            if kind != KILL_DRIVER
        )
        return cls(inject, tuple(step for kind, step in chosen if kind == KILL_DRIVER))

    def disturbed(self, spec: JobSpec, name: str) -> JobSpec:
        """Return the job under another name and with these faults."""
        document = spec.model_dump(mode="json")
        document["name"] = name
        document["faults"]["inject"] = [fault.model_dump(mode="json") for fault in self.inject]
        return job_of(document, source=name)


def _kinds(spec: JobSpec, chance: random.Random, count: int) -> Sequence[str]:
    possible = [str(kind) for kind in HARMLESS] + [KILL_DRIVER]
    if spec.resources.address is not None:  # it may steer from any machine
        possible.remove(FaultKind.KILL_CONTROLLER)
    most = spec.num_steps - 1
    kinds: list[str] = []
    while len(kinds) < min(count, most):
        kinds += chance.sample(possible, len(possible))
    return kinds[: min(count, most)]
