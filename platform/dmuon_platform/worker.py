"""What every worker runs: read this file first to see how a training goes."""

import os
import socket
import time
from pathlib import Path
from typing import Any

from dmuon_platform.assembly import assemble
from dmuon_platform.data import open_dataset
from dmuon_platform.errors import Diverged
from dmuon_platform.events import Journal
from dmuon_platform.place import Place
from dmuon_platform.saving import Saving
from dmuon_platform.spec import JobSpec
from dmuon_platform.spool import MetricsSpool
from dmuon_platform.training import Training


def train_worker(config: dict[str, Any]) -> dict[str, Any]:
    """Train the job from its newest checkpoint to its end; runs on every rank.

    Args:
        config: Plain data from the driver: the ``spec``, the ``dataset`` folder, the ``attempt``
            number, and ``facts`` that every checkpoint records.

    Returns:
        What the finished training is known by: steps, weights' digest, last evaluation.
    """
    spec = JobSpec.model_validate(config["spec"])
    place = Place.take(spec)
    model, optimizer, plan = assemble(spec, place)
    training = Training(spec, place, model, optimizer, open_dataset(Path(config["dataset"])))
    saving = Saving(spec, place, config["attempt"], config["facts"])
    record = _Record(spec, place, config["attempt"])

    step = saving.restore(training)
    metrics: dict[str, float] = {}
    record.started(step, plan)
    while step < spec.num_steps:
        metrics = next_step(training, saving, step)
        step += 1
        is_last = step == spec.num_steps
        if is_last or _is_due(step, spec.evaluation.every):
            metrics |= training.evaluate()
        record.step(step, metrics)
        if is_last or _is_due(step, spec.checkpoint.every):
            saving.save(training, step, metrics)
    saving.finish()

    result = {
        "step": step,
        "evaluation": _evaluation(metrics) or _evaluation(training.evaluate()),
        "weights_sha256": saving.weights_digest(),
    }
    record.finished(result)
    return result


def next_step(training: Training, saving: Saving, step: int) -> dict[str, float]:
    """Do one step; commit the checkpoint beside it once every rank has written it. Collective."""
    try:
        metrics = training.step(step, ready=saving.is_written)
    except Diverged:  # on all ranks; what was saved before is good
        saving.settle()
        raise
    if training.all_ready:
        saving.settle()
    return metrics


def _evaluation(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if key.startswith("evaluation/")}


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


class _Record:
    """Rank 0 writes down what happens; the other ranks say nothing."""

    def __init__(self, spec: JobSpec, place: Place, attempt: int) -> None:
        self._place = place
        self._attempt = attempt
        self._spool = MetricsSpool(spec.run_dir) if place.is_first else None
        self._journal = Journal(spec.run_dir) if place.is_first else None

    def started(self, step: int, plan: Any) -> None:
        """Note where this attempt starts and which processes it is. Collective."""
        workers = self._place.gather({"host": socket.gethostname(), "pid": os.getpid()})
        self._note("training_started", step=step, workers=workers, plan=plan.to_dict())

    def step(self, step: int, metrics: dict[str, float]) -> None:
        if self._spool is not None:
            self._spool.append(step, metrics, time.time())

    def finished(self, result: dict[str, Any]) -> None:
        self._note("trained", **result)

    def _note(self, kind: str, **data: Any) -> None:
        if self._journal is not None:
            self._journal.append(kind, attempt=self._attempt, **data)
