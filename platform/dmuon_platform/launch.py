"""From a job to a finished, tracked and registered model: what the driver does, in order."""

import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

import dmuon
from dmuon_platform import cluster, preflight
from dmuon_platform.data import DatasetInfo, check_size, open_dataset
from dmuon_platform.driver_lease import Driver, DriverLease
from dmuon_platform.driving import Driving
from dmuon_platform.errors import GracefulStop, PlatformError, exit_code_of, problem_of
from dmuon_platform.evaluation import bigram_bits_per_byte
from dmuon_platform.event_facts import finite, whole
from dmuon_platform.event_text import event_text
from dmuon_platform.events import JOB_CHANGED, Journal
from dmuon_platform.export import export_model
from dmuon_platform.git_state import git_state
from dmuon_platform.handover import ADDRESS_KEY, settle_handover
from dmuon_platform.lengthening import rise_of_rate
from dmuon_platform.metric_names import BITS_PER_BYTE
from dmuon_platform.model import hf_config
from dmuon_platform.origin import Start, handed_on, keep_origin, start_of
from dmuon_platform.output import standard_output
from dmuon_platform.progress import ProgressView
from dmuon_platform.ray_session import RaySession
from dmuon_platform.run_folder import DATA_FOLDER, JOB_FILE, REPORT_FILE, resume_there
from dmuon_platform.run_story import restarts_of
from dmuon_platform.spec import JobSpec
from dmuon_platform.spool import MetricsSpool
from dmuon_platform.stop_request import StopFile, pause
from dmuon_platform.stop_signals import StopSignals
from dmuon_platform.store import CheckpointStore
from dmuon_platform.summary import Summary
from dmuon_platform.supervisor import Failure, Supervisor, unfinished_failures
from dmuon_platform.tracking import Delivery, Tracker, deliver_pending
from dmuon_platform.waiting import wait_for_room

RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray inside a submitted job: JSON, with its submission id below ``metadata``."""


def run_job(spec: JobSpec, console: Console | None = None) -> Summary:
    """Run the job to its end, or go on with it where an earlier launch of its name stopped.

    Everything that can be wrong with the job or its surroundings is refused before workers start.

    Raises:
        PlatformError: What is wrong, with an ``exit_code`` for the shell.
    """
    console = console or Console(file=standard_output())
    code = git_state(Path.cwd())
    session = RaySession(spec := preflight.resolve(spec))
    # From here on the working folder may go: Ray unpacks an upload again for another of its nodes.
    with _settled(spec), preflight.storage_explained(spec):
        return _run(spec, session, code, console)


def _run(spec: JobSpec, session: RaySession, code: dict[str, Any], console: Console) -> Summary:
    start = start_of(spec, spec.run_dir.parent / DATA_FOLDER)
    preflight.check_job(start.spec, has_text=start.dataset is None, begins=start.begins)
    preflight.check_storage(spec)
    preflight.check_earlier_run(spec)
    keep_origin(start.spec)
    journal = Journal(spec.run_dir)
    address = cluster.address_of(spec)
    lease = DriverLease(spec.run_dir, address, _ray_job(), _ray_metadata().get(ADDRESS_KEY))
    finished = preflight.finished_event(spec)
    if finished is not None:
        with lease:
            if whole(finished, "steps") == spec.num_steps >= _saved(journal):
                preflight.record_job(spec)  # a launch may have left a longer one that it never did
            summary = _delivered(spec, Summary.from_dict(finished), deliver_pending(spec))
        _say(console, f"{spec.name} is already finished: nothing to do.\n{summary.text()}")
        return summary
    cluster.check_address(spec)
    _tell_where(spec, address, console)
    earlier = unfinished_failures(journal.read())
    with (
        lease,
        _written_down(journal),
        preflight.storage_explained(spec),  # here too, so that the journal has it in words
        _stop_signals(spec, lease, console) as signals,
        session,
    ):
        info = _prepare(spec, start, session, lease, console)
        with Tracker(spec, _facts(spec, info, code)) as tracker:
            with ProgressView(spec, console) as view, signals.training(view.end):
                driving = Driving(start.spec, session, view, lease.launch, _told(spec, start, info))
                trained = _train(spec, journal, driving, view, earlier)
            session.close()
            tell = partial(_tell_damage, journal, console)
            summary = _conclude(start.spec, info, journal, trained, tell)
            delivery = tracker.finish("FINISHED")
    summary = _delivered(spec, summary, delivery)
    _say(console, summary.text())
    return summary


def _prepare(
    spec: JobSpec, start: Start, session: RaySession, lease: DriverLease, console: Console
) -> DatasetInfo:
    """Wait for room in the cluster, which preparing the data needs too, and prepare it.

    The job is recorded when that is done, for a text that is refused may be changed; where an
    earlier launch has recorded it, at once, so that a run that is stopped here is resumed as it is.
    """
    info = start.dataset
    is_recorded = (spec.run_dir / JOB_FILE).exists()
    if is_recorded:
        _record(spec, console)
    listen = partial(pause, StopFile(spec.run_dir), lease.launch)
    wait_for_room(spec, session, listen, partial(_say, console), settle_s=0.0)
    if info is None:
        info = session.prepare(spec.run_dir.parent / DATA_FOLDER)
    else:
        _say(console, f"its text is not where data.source says; it was prepared in {info.folder}")
    check_size(info, spec.train.global_batch_size)
    if not is_recorded:
        preflight.record_job(spec)
    return info


def _record(spec: JobSpec, console: Console) -> None:
    """Record the job, and tell what has changed since the launch before."""
    if changes := preflight.record_job(spec):
        Journal(spec.run_dir).append(JOB_CHANGED, changes=changes)
        _say(console, f"{spec.name} goes on with another job: {', '.join(changes)}")


def _ray_job() -> str | None:
    return _ray_metadata().get("job_submission_id")


def _ray_metadata() -> dict[str, str]:
    job = json.loads(os.environ.get(RAY_JOB) or "{}")
    metadata: dict[str, str] = job.get("metadata", {})
    return metadata


def _tell_where(spec: JobSpec, address: str | None, console: Console) -> None:
    if address is None and (elsewhere := _elsewhere(spec)) is not None:
        _say(console, elsewhere)
    how = "starting Ray" if address is None else f"joining Ray at {address}"
    _say(console, f"{spec.name}: {how} and preparing the data in {spec.run_dir.parent}")


def _elsewhere(spec: JobSpec) -> str | None:
    """Say of a run that a cluster ran last that it goes on here; None of any other."""
    driver = Driver.read(spec.run_dir)
    if driver is None or driver.ray_job is None:
        return None
    told = f"{spec.name} was run as {driver.ray_job} on a cluster last, and goes on on this machine"
    if driver.job_server is None:
        return told
    return f"{told}; `{resume_there(spec.run_dir, driver.job_server)}` goes on with it there"


@contextmanager
def _settled(spec: JobSpec) -> Iterator[None]:
    """Note for who submitted this launch that it is over, also when it is refused."""
    refusal = None
    try:
        yield
    except PlatformError as error:
        refusal = str(error)
        raise
    finally:
        settle_handover(spec.run_dir, _ray_job(), refusal)


@contextmanager
def _written_down(journal: Journal) -> Iterator[None]:
    """Note in the journal that a launch begins, and with which exit code it ends."""
    journal.append("launched", host=socket.gethostname(), pid=os.getpid())
    try:
        yield
    except BaseException as error:
        with suppress(OSError):  # a full disk; the error itself is what counts
            journal.append(
                "ended",
                exit_code=exit_code_of(error),
                problem=problem_of(error),
                is_asked=isinstance(error, GracefulStop | KeyboardInterrupt),
            )
        raise
    journal.append("ended", exit_code=0)


def _stop_signals(spec: JobSpec, lease: DriverLease, console: Console) -> StopSignals:
    return StopSignals(spec.run_dir, lease.launch, lambda text: _say(console, text))


def _facts(spec: JobSpec, info: DatasetInfo, code: dict[str, Any]) -> dict[str, Any]:
    source = spec.data.source
    name = source if isinstance(source, str) else ", ".join(source)
    return {"git": code, "dataset": {"name": name, **vars(info)}}


def _told(spec: JobSpec, start: Start, info: DatasetInfo) -> dict[str, Any]:
    facts = {"spec_digest": spec.digest(), "dataset_digest": info.digest}
    return {"dataset": info.folder, "facts": facts, "files": handed_on(start.spec)}


def _train(
    spec: JobSpec,
    journal: Journal,
    driving: Driving,
    view: ProgressView,
    earlier: Sequence[Failure],
) -> dict[str, Any]:
    """Train to the last step, over as many attempts as it takes; return the ``trained`` event."""
    trained = journal.last("trained")
    if trained is not None and (whole(trained, "step") or 0) >= spec.num_steps:
        return trained  # an earlier launch came this far, and not to the end

    def note(failure: Failure) -> None:
        journal.note(
            "restarted",
            attempt=failure.attempt,
            step=failure.step,
            saved=failure.saved,
            is_loss=failure.cause.is_loss,
            cause=failure.cause.summary,
            details=failure.cause.details,
        )

    if rise := rise_of_rate(spec, journal.read()):
        view.say(rise)
    supervisor = Supervisor(spec.faults, earlier)
    supervisor.run(driving.run, lambda: (view.step, _saved(journal)), note, driving.pause)
    trained = journal.last("trained")
    if trained is None:
        raise PlatformError(f"The workers ended, but {spec.run_dir} does not say that they trained")
    return trained


def _saved(journal: Journal) -> int:
    return whole(journal.last("checkpoint_saved"), "step") or 0


def _tell_damage(journal: Journal, console: Console, damage: dmuon.DamagedCheckpointError) -> None:
    """Tell of a checkpoint that is passed over, unless the workers have."""
    told = [e.get("damage") for e in journal.read() if e["kind"] == "checkpoint_damaged"]
    if str(damage) not in told:
        journal.note("checkpoint_damaged", damage=str(damage))
        _say(console, event_text({"kind": "checkpoint_damaged", "damage": str(damage)}))


def _conclude(
    spec: JobSpec,
    info: DatasetInfo,
    journal: Journal,
    trained: dict[str, Any],
    on_damage: Callable[[dmuon.DamagedCheckpointError], None],
) -> Summary:
    """Export the model, and write down what the run has come to."""
    newest = CheckpointStore(spec.run_dir, on_damage).newest_verified()
    if newest is None:
        raise PlatformError(
            f"{spec.run_dir} has no whole checkpoint left, so there is no model to export. Launch "
            "the job again under another name."
        )
    export = None
    if spec.export.enabled:
        config = hf_config(spec.model, spec.data.sequence_length, info.separator_id)
        files = handed_on(spec)
        export = export_model(spec.run_dir, newest.path, newest.manifest, config, files)
    spool = MetricsSpool(spec.run_dir)
    continuation = spool.continuation()
    start = spool.start()
    summary = Summary(
        name=spec.name,
        steps=trained["step"],
        tokens=trained["step"] * spec.tokens_per_step,
        restarts=restarts_of(journal.read()),
        bits_per_byte=trained["evaluation"][BITS_PER_BYTE],
        bigram_bits_per_byte=bigram_bits_per_byte(open_dataset(info.folder)),
        start_bits_per_byte=None if start is None else finite(start.metrics, BITS_PER_BYTE),
        checkpoint=str(newest.path),
        weights_sha256=trained["weights_sha256"],
        export=None if export is None else str(export.folder),
        steps_replayed_equal=continuation.equal,
        steps_replayed_different=continuation.different,
    )
    journal.append("finished", **summary.to_dict())
    return summary


def _delivered(spec: JobSpec, summary: Summary, delivery: Delivery) -> Summary:
    return summary.delivered(delivery, spec.export.alias, spec.run_dir / REPORT_FILE)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
