"""``dmuon bench-recovery``: how long a job needs from a fault to its next training step."""

import argparse
import json
import tempfile
from pathlib import Path

from dmuon_platform import preflight
from dmuon_platform.chaos import prepared, undisturbed_run
from dmuon_platform.chaos_schedule import ChaosSchedule
from dmuon_platform.errors import PlatformError, SpecError
from dmuon_platform.events import Journal
from dmuon_platform.launches import LOG_FILE, Launches
from dmuon_platform.line_file import LineFile
from dmuon_platform.recoveries import Recovery, recoveries
from dmuon_platform.spec import JobSpec, load_job
from dmuon_platform.spec.fault import FaultKind, InjectedFault
from dmuon_platform.spool import METRICS_FILE
from dmuon_platform.text_table import text_table

KINDS = (FaultKind.KILL, FaultKind.FREEZE, FaultKind.STALL)
"""Of which one each strikes, at even distances; then the driver is killed."""

COLUMNS = ("detection_s", "restart_s", "restore_s", "first_step_s", "total_s")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; print a table, or JSON.

    Raises:
        PlatformError: The job does not come to its end.
    """
    job = preflight.resolve(load_job(arguments.job, arguments.set))
    with tempfile.TemporaryDirectory(prefix="dmuon-bench-") as folder:
        base = prepared(undisturbed_run(job, Path(folder)))
        schedule = recovery_schedule(base)
        spec = schedule.disturbed(base, f"{job.name}-recovery")
        if spec.run_dir.exists():
            raise SpecError(
                f"{spec.run_dir} is there from an earlier benchmark. Delete it, or choose another "
                "name (--set name=NAME)."
            )
        code = Launches(spec, Path(folder) / "job.toml", schedule.driver_kills).run()
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


def recovery_schedule(spec: JobSpec) -> ChaosSchedule:
    """Return one fault of each of `KINDS` and one end of the driver, at even distances.

    Raises:
        SpecError: The run has too few steps.
    """
    pace = spec.num_steps // (len(KINDS) + 2)
    if pace < 1:
        raise SpecError(f"train.steps: {spec.num_steps} are too few for this; write 10 or more")
    _, workers = spec.resources.bounds
    inject = tuple(
        InjectedFault(kind=kind, step=pace * number, rank=workers - 1)
        for number, kind in enumerate(KINDS, start=1)
    )
    return ChaosSchedule(inject, (pace * (len(KINDS) + 1),))


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
