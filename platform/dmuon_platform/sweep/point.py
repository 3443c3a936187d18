"""One training of a sweep: the platform's own loop, in one process and without Ray."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dmuon_platform.assembly import assemble
from dmuon_platform.data import open_dataset
from dmuon_platform.errors import Diverged
from dmuon_platform.events import Journal
from dmuon_platform.place import Place
from dmuon_platform.preflight import record_job
from dmuon_platform.record import Record
from dmuon_platform.spec import JobSpec
from dmuon_platform.spool import evaluation_of
from dmuon_platform.training import Training

LOOK_S = 1.0
"""Between two looks whether the command is still there."""

ATTEMPT = 1
"""A point is short: one that was interrupted begins anew, and writes the same again."""


def train_point(document: dict[str, Any], dataset: str) -> None:
    """Train a job to its end, in a process of its own; its run folder says what came of it.

    Args:
        document: The job.
        dataset: Folder of its prepared text.
    """
    spec = JobSpec.model_validate(document)
    spec.run_dir.mkdir(parents=True, exist_ok=True)
    record_job(spec)
    journal = Journal(spec.run_dir)
    journal.append("launched", host=socket.gethostname(), pid=os.getpid())
    with _alone(spec):
        try:
            _train(spec, Path(dataset))
            journal.append("ended", exit_code=0)
        except Diverged as error:
            journal.append("ended", exit_code=error.exit_code, problem=str(error))


def end_with(parent: int) -> None:
    """Let this process end when the command that started it is gone, however that ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _alone(spec: JobSpec) -> Iterator[None]:
    """Be the only rank there is."""
    backend = "cpu:gloo,cuda:nccl" if spec.resources.gpus_per_worker else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]  # it lacks __all__
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _train(spec: JobSpec, dataset: Path) -> None:
    place = Place.take(spec)
    model, optimizer, plan = assemble(spec, place)
    training = Training(spec, place, model, optimizer, open_dataset(dataset))
    record = Record(spec, place, ATTEMPT)
    record.started(0, plan, 0.0)
    if spec.model.path is not None:
        record.start(training.evaluate)
    every = spec.evaluation.every
    for step in range(spec.num_steps):
        metrics = training.step(step)
        done = step + 1
        if done == spec.num_steps or (every is not None and done % every == 0):
            metrics |= training.evaluate()
        record.step(done, metrics)
    record.sync()
    record.finished({"step": spec.num_steps, "evaluation": evaluation_of(metrics)})
