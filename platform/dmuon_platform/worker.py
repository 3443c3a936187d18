"""What every worker runs: read this file first to see how a training goes."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dmuon_platform.assembly import assemble
from dmuon_platform.data import open_dataset
from dmuon_platform.errors import Diverged
from dmuon_platform.fault_injection import arm
from dmuon_platform.heartbeat import Phase
from dmuon_platform.origin import check_restored
from dmuon_platform.place import Place
from dmuon_platform.pulse import Pulse
from dmuon_platform.record import Record
from dmuon_platform.saving import Saving
from dmuon_platform.setbacks import Setbacks
from dmuon_platform.spec import JobSpec
from dmuon_platform.spool import evaluation_of
from dmuon_platform.stability import Verdict
from dmuon_platform.stop_request import StopRequest
from dmuon_platform.training import Training


def train_worker(config: dict[str, Any]) -> dict[str, Any]:
    """Train the job from its newest checkpoint to its end; runs on every rank.

    Args:
        config: Plain data from the driver: the ``spec``, the ``dataset`` folder, the ``attempt``
            number, the ``launch`` it belongs to, and ``facts`` and ``files`` of every checkpoint.

    Returns:
        What the training is known by, once it is at its end or somebody wanted it to stop.
    """
    spec = JobSpec.model_validate(config["spec"])
    place = Place.take(spec)
    with Pulse(spec.run_dir, spec.faults, place, config["attempt"], config["launch"]) as pulse:
        model, optimizer, plan = assemble(spec, place)
        dataset = open_dataset(Path(config["dataset"]))
        training = Training(spec, place, model, optimizer, dataset, pulse.at)
        record = Record(spec, place, config["attempt"])
        saving = Saving(spec, place, config["attempt"], config["facts"], pulse.at, record.sync)
        saving.files = config["files"]
        return train(spec, training, saving, pulse, record, plan)


def train(
    spec: JobSpec, training: Training, saving: Saving, pulse: Pulse, record: Record, plan: Any
) -> dict[str, Any]:
    """Go on from the newest checkpoint, to the last step or to a request to stop. Collective."""
    arm(spec, training, saving, record)
    begun = time.monotonic()
    step = saving.restore(training)
    check_restored(spec, step)
    restore_s = time.monotonic() - begun
    setbacks = Setbacks(spec, training, saving, record)
    setbacks.recall(step)
    metrics: dict[str, float] = {}
    record.started(step, plan, restore_s)
    if step == 0 and spec.model.path is not None:
        record.start(training.evaluate)
    while step < spec.num_steps:
        pulse.at(Phase.DATA, step)
        metrics = next_step(training, saving, step, stop=pulse.should_stop)
        step = setbacks.handle(step, metrics)
        if training.verdict is Verdict.ROLL_BACK:
            continue
        is_last = step == spec.num_steps
        if is_last or _is_due(step, spec.evaluation.every):
            metrics |= training.evaluate()
        record.step(step, metrics, training.updates)
        if is_last or training.any_stop or _is_due(step, spec.checkpoint.every):
            saving.save(training, step, metrics)
        if training.any_stop and not is_last:
            return stop(step, saving, record, pulse.agree())
    saving.finish()
    pulse.at(Phase.END)

    result = {
        "step": step,
        "evaluation": evaluation_of(metrics) or evaluation_of(training.evaluate()),
        "weights_sha256": saving.weights_digest(),
    }
    record.finished(result)
    return result


def next_step(
    training: Training, saving: Saving, step: int, *, stop: bool = False
) -> dict[str, float]:
    """Do one step; commit the checkpoint beside it once every rank has written it. Collective."""
    try:
        metrics = training.step(step, ready=saving.is_written, stop=stop)
    except Diverged:  # on all ranks; what was saved before is good
        saving.settle()
        raise
    if training.all_ready:
        saving.settle()
    return metrics


def stop(step: int, saving: Saving, record: Record, request: StopRequest) -> dict[str, Any]:
    """End for a request, with what could be saved; return what it was. Collective."""
    saving.settle()
    result = {"step": step, "checkpoint": saving.newest_step, **asdict(request)}
    record.stopped(result)
    return {"stopped": result}


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
