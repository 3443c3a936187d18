"""From a job to a finished, tracked and registered model: what the driver does, in order."""

from pathlib import Path
from typing import Any

from rich.console import Console

from dmuon_platform import cluster, preflight
from dmuon_platform.data import DatasetInfo, check_size, open_dataset, prepare_dataset
from dmuon_platform.errors import PlatformError
from dmuon_platform.evaluation import bigram_bits_per_byte
from dmuon_platform.events import Journal
from dmuon_platform.progress import ProgressView
from dmuon_platform.spec import JobSpec
from dmuon_platform.spool import MetricsSpool
from dmuon_platform.store import CheckpointStore
from dmuon_platform.summary import Summary
from dmuon_platform.supervisor import Failure, supervise

DATA_FOLDER = "data"
"""Prepared datasets lie beside the runs, since runs share them."""


def run_job(spec: JobSpec, console: Console | None = None) -> Summary:
    """Run the job to its end, or go on with it where an earlier launch of its name stopped.

    Everything that can be wrong with the job or its surroundings is refused before workers start.

    Raises:
        PlatformError: What is wrong, with an ``exit_code`` for the shell.
    """
    console = console or Console()
    spec = preflight.resolve(spec)
    preflight.check_job(spec)
    preflight.check_storage(spec)
    preflight.check_earlier_run(spec)
    journal = Journal(spec.run_dir)
    finished = journal.last("finished")
    if finished is not None and finished["steps"] >= spec.num_steps:
        summary = Summary.from_dict(finished)
        _say(console, f"{spec.name} is already finished: nothing to do.\n{summary.text()}")
        return summary
    cluster.check_address(spec)
    with cluster.connected(spec):
        info = prepare_dataset(spec.data, spec.run_dir.parent / DATA_FOLDER)
        check_size(info, spec.train.global_batch_size)
        preflight.record_job(spec)
        trained = _train(spec, info, journal, console)
        summary = _conclude(spec, info, journal, trained)
    _say(console, summary.text())
    return summary


def _train(spec: JobSpec, info: DatasetInfo, journal: Journal, console: Console) -> dict[str, Any]:
    """Train to the last step, over as many attempts as it takes; return the ``trained`` event."""
    trained = journal.last("trained")
    if trained is not None and trained["step"] >= spec.num_steps:
        return trained  # an earlier launch came this far, and not to the end

    def note(failure: Failure) -> None:
        journal.append(
            "restarted",
            attempt=failure.attempt,
            step=failure.step,
            cause=failure.cause.summary,
            details=failure.cause.details,
        )

    from dmuon_platform.attempts import Attempts  # imports ray, which `cluster` prepares for

    facts = {"spec_digest": spec.digest(), "dataset_digest": info.digest}
    with ProgressView(spec, console) as view:
        attempts = Attempts(spec, Path(info.folder), facts, view.refresh)
        supervise(attempts.run, lambda: view.step, spec.faults.max_failures, note)
    trained = journal.last("trained")
    if trained is None:
        raise PlatformError(f"The workers ended, but {spec.run_dir} does not say that they trained")
    return trained


def _conclude(
    spec: JobSpec, info: DatasetInfo, journal: Journal, trained: dict[str, Any]
) -> Summary:
    """Put together what the run has come to, and write down that it is finished."""
    newest = CheckpointStore(spec.run_dir).newest_verified()
    continuation = MetricsSpool(spec.run_dir).continuation()
    summary = Summary(
        name=spec.name,
        steps=trained["step"],
        tokens=trained["step"] * spec.tokens_per_step,
        restarts=sum(event["kind"] == "training_started" for event in journal.read()) - 1,
        bits_per_byte=trained["evaluation"]["evaluation/bits_per_byte"],
        bigram_bits_per_byte=bigram_bits_per_byte(open_dataset(Path(info.folder))),
        checkpoint=str(newest.path if newest else None),
        weights_sha256=trained["weights_sha256"],
        steps_replayed_equal=continuation.equal,
        steps_replayed_different=continuation.different,
    )
    journal.append("finished", **summary.to_dict())
    return summary


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
