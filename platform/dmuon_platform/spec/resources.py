"""Section ``resources``: the workers and what each of them needs."""

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import Discriminator, Field, PositiveInt, Tag

from dmuon_platform.spec.problem import Problem
from dmuon_platform.spec.section import Section
from dmuon_platform.spec.uri import without_credentials

AUTO = "auto"
"""As an address: the cluster that this machine is part of."""

HEAD = re.compile(r"[^\s/]+:\d{1,5}")


class WorkerRange(Section):
    """Between ``min`` and ``max`` workers, as many as there is room for and as fit the job."""

    min: PositiveInt = Field(examples=[2])
    """Fewest workers to train with."""

    max: PositiveInt = Field(examples=[4])
    """Most workers to use."""


def _number_or_range(value: object) -> str | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return "fixed-workers"
    return "elastic-workers" if isinstance(value, dict | WorkerRange) else None


class ResourcesSpec(Section):
    """How many workers, where, and how big each is."""

    workers: Annotated[
        Annotated[PositiveInt, Tag("fixed-workers")]
        | Annotated[WorkerRange, Tag("elastic-workers")],
        Discriminator(
            _number_or_range,
            custom_error_type="number_or_range",
            custom_error_message="must be a whole number, or a table {min = 2, max = 4}",
        ),
    ] = 2
    """Processes that train, one a GPU if they have any: a number, or ``{min, max}``."""

    cpus_per_worker: PositiveInt = 1
    """CPU cores of one worker; also its threads when it has no GPU."""

    gpus_per_worker: int = Field(0, ge=0, le=1)
    """GPUs of one worker: 0 or 1."""

    address: str | None = Field(None, min_length=1)
    """``host:port`` of a Ray cluster, or ``auto``; none for a local Ray of the job's own."""

    @property
    def of_one_worker(self) -> dict[str, float]:
        """What Ray has to keep for one worker."""
        gpus = {"GPU": float(self.gpus_per_worker)} if self.gpus_per_worker else {}
        return {"CPU": float(self.cpus_per_worker), **gpus}

    @property
    def bounds(self) -> tuple[int, int]:
        """Fewest and most workers."""
        if isinstance(self.workers, int):
            return self.workers, self.workers
        return self.workers.min, self.workers.max

    @property
    def possible_workers(self) -> range:
        """Every number between the two; which of them the run may have, the job knows."""
        fewest, most = self.bounds
        return range(fewest, most + 1)

    def problems(self) -> Iterator[Problem]:
        """Yield a range that is upside down, and what is no address of a head."""
        fewest, most = self.bounds
        if fewest > most:
            yield Problem(
                "resources.workers",
                f"min = {fewest} must not be above max = {most}",
                f"write {{min = {most}, max = {fewest}}}",
            )
        if self.address not in (None, AUTO) and not HEAD.fullmatch(str(self.address)):
            yield Problem(
                "resources.address",
                f"{without_credentials(str(self.address))!r} is not 'host:port' of a Ray cluster's "
                "head, nor 'auto'",
                "write its own port, 6379 unless changed; neither Ray Client (ray://) nor the job "
                "server (http://) can be joined, so from outside the cluster use dmuon submit",
            )
