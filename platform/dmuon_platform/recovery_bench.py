"""``dmuon bench-recovery``: how long a job needs from a fault to its next training step."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from dmuon_platform import preflight
from dmuon_platform.chaos import prepared, undisturbed_run
from dmuon_platform.chaos_schedule import KILL_DRIVER, ChaosSchedule
from dmuon_platform.errors import PlatformError, SpecError
from dmuon_platform.events import Journal
from dmuon_platform.launches import LOG_FILE, Launches
from dmuon_platform.line_file import LineFile
from dmuon_platform.recoveries import Recovery, recoveries
from dmuon_platform.spec import JobSpec, load_job
from dmuon_platform.spec.fault import FaultKind, InjectedFault
from dmuon_platform.spool import METRICS_FILE
from dmuon_platform.text_table import text_table

KINDS = (FaultKind.KILL, FaultKind.FREEZE, FaultKind.STALL, KILL_DRIVER)
"""What strikes unless something else is asked for."""

ENDING = (
    *KINDS,
    FaultKind.RAISE,
    FaultKind.KILL_DURING_SAVE,
    FaultKind.CORRUPT_CHECKPOINT,
    FaultKind.KILL_CONTROLLER,
)
"""What ends an attempt, so that there is a way back to be timed."""

COLUMNS = ("detection_s", "restart_s", "restore_s", "first_step_s", "total_s")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; print a table, or JSON.

    Raises:
        SpecError: It is not known what should strike, or there is an earlier benchmark.
        PlatformError: The job does not come to its end.
    """
    kinds = _kinds(arguments.kinds)
    job = preflight.resolve(load_job(arguments.job, arguments.set))
    schedule = recovery_schedule(job, kinds)
    run_dir = job.run_dir.with_name(f"{job.name}-recovery")
    if run_dir.exists():
        raise SpecError(
            f"{run_dir} is there from an earlier benchmark. Delete it, or choose another name "
            "(--set name=NAME)."
        )
    spec = schedule.disturbed(prepared(undisturbed_run(job)), run_dir.name)
    code = Launches(spec, schedule.driver_kills).run()
    if code != 0:
        raise PlatformError(
            f"{spec.name} ended with exit code {code}; {spec.run_dir / LOG_FILE} says why."
        )
    found = recoveries(Journal(spec.run_dir).read(), _step_times(spec.run_dir))
    if arguments.json:
        print(json.dumps([each.to_dict() for each in found], indent=2))
    else:
        print(_table(spec, found))
    return 0


def _kinds(names: str | None) -> tuple[str, ...]:
    kinds = KINDS if names is None else tuple(names.split(","))
    unknown = sorted(set(kinds) - set(ENDING))
    if unknown or len(set(kinds)) < len(kinds):
        wrong = f"{', '.join(unknown)} is none" if unknown else "one is there twice"
        raise SpecError(
            f"--kinds {names}: {wrong}; write one or more of {', '.join(ENDING)}, with commas"
        )
    return kinds


def recovery_schedule(spec: JobSpec, kinds: Sequence[str] = KINDS) -> ChaosSchedule:
    """Return one fault of each kind, in that order and at even distances.

    Raises:
        SpecError: The run has too few steps.
    """
    pace = spec.num_steps // (len(kinds) + 1)
    if pace < 1:
        raise SpecError(f"train.steps: {spec.num_steps} are too few for this; write 10 or more")
    _, workers = spec.resources.bounds
    steps = {kind: pace * number for number, kind in enumerate(kinds, start=1)}
    inject = tuple(
        InjectedFault(kind=FaultKind(kind), step=step, rank=workers - 1)
        for kind, step in steps.items()
        if kind != KILL_DRIVER
    )
    return ChaosSchedule(inject, tuple(steps[kind] for kind in kinds if kind == KILL_DRIVER))


def _step_times(run_dir: Path) -> list[tuple[int, float]]:
    lines = (line.content for line in LineFile(run_dir / METRICS_FILE).lines())
    return [(each["step"], each["time"]) for each in lines if "step" in each]


def _table(spec: JobSpec, found: list[Recovery]) -> str:
    rows = [
        (each.fault, *(f"{each.to_dict()[name]:.2f}" for name in COLUMNS), each.steps_again)
        for each in found
    ]
    header = ("fault", *(name.removesuffix("_s") + " s" for name in COLUMNS), "steps again")
    return f"{text_table(header, rows)}\nfaults.stall_s = {spec.faults.stall_s:g}"
