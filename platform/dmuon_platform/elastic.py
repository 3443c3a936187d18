"""How many workers an attempt gets: a pure function of the job and of the room there is.

The rule: the largest number between ``min`` and ``max`` for which there is room and which fits the
mesh and the batch. The mesh of fewer workers follows as that of any number does: what the job says
of ``replicate`` and ``shard`` stays, and the one left out is the quotient. The global batch stays,
so each worker takes more micro-batches; samples, rates and the order of both are those of the job.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dmuon_platform.spec import JobSpec


@dataclass(frozen=True)
class NodeRoom:
    """One machine of the cluster: what is free on it now, and what it has in all."""

    cpus: float
    gpus: float
    all_cpus: float
    all_gpus: float
    is_leaving: bool = False
    """Whether it has been told to leave the cluster; then there is no room on it."""

    @property
    def is_used(self) -> bool:
        """Whether something of it is taken."""
        return self.cpus < self.all_cpus or self.gpus < self.all_gpus

    def emptied(self) -> "NodeRoom":
        """Return it as it is when nothing of it is taken."""
        return replace(self, cpus=self.all_cpus, gpus=self.all_gpus)


def num_places(spec: JobSpec, nodes: Sequence[NodeRoom]) -> int:
    """Return how many workers there is room for; each is on one machine as a whole."""
    resources = spec.resources
    places = 0
    for node in nodes:
        if node.is_leaving:
            continue
        by_cpu = int(node.cpus // resources.cpus_per_worker)
        by_gpu = (
            int(node.gpus // resources.gpus_per_worker) if resources.gpus_per_worker else by_cpu
        )
        places += min(by_cpu, by_gpu)
    return places


def num_leaving(nodes: Sequence[NodeRoom]) -> int:
    """Return how many machines of which something is taken are about to leave the cluster."""
    return sum(node.is_leaving and node.is_used for node in nodes)


def choose_workers(spec: JobSpec, places: int) -> int | None:
    """Return with how many workers to go on, None if there is no room for the fewest.

    Args:
        spec: The job.
        places: For how many workers there is room.
    """
    return max((n for n in spec.fitting_workers if n <= places), default=None)


def shortage(spec: JobSpec, nodes: Sequence[NodeRoom]) -> str:
    """Say what is missing for the fewest workers, and what to do."""
    resources = spec.resources
    fewest = min(spec.fitting_workers)
    needs = f"{fewest * resources.cpus_per_worker} CPUs"
    if resources.gpus_per_worker:
        needs += f" and {fewest * resources.gpus_per_worker} GPUs"
    staying = [node for node in nodes if not node.is_leaving]
    free = f"{sum(n.cpus for n in staying):g} CPUs and {sum(n.gpus for n in staying):g} GPUs"
    return (
        f"{fewest} workers need {needs}, and {free} are free on the {len(staying)} machines of the "
        "cluster. Lower resources.workers or resources.cpus_per_worker, or add machines."
    )
