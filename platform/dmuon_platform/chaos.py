"""``dmuon chaos``: a job under random faults, compared with the same job undisturbed."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from dmuon_platform import preflight
from dmuon_platform.chaos_schedule import KILL_DRIVER, ChaosSchedule
from dmuon_platform.cluster import check_address
from dmuon_platform.data import Dataset, open_dataset, prepare_dataset
from dmuon_platform.errors import PlatformError, SpecError
from dmuon_platform.events import Journal
from dmuon_platform.launches import LOG_FILE, Launches
from dmuon_platform.metric_names import TIME
from dmuon_platform.run_comparison import Check, compare
from dmuon_platform.run_folder import DATA_FOLDER
from dmuon_platform.spec import JobSpec, job_of, load_job
from dmuon_platform.spool import MetricsSpool
from dmuon_platform.text_table import text_table

STALL_STEPS = 20
LEAST_STALL_S = 10.0
"""A rank counts as stuck after as long as so many of the slowest steps, and at least so long: the
default would make every frozen rank cost minutes. The first step is none of them, since a pulse is
patient with what it sees for the first time."""

MANY = 1000
"""Failures allowed: they are made on purpose."""


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return 0 if the job survived, 1 if not.

    Raises:
        PlatformError: The undisturbed run fails.
        SpecError: An earlier chaos with this seed has left its runs.
    """
    job = preflight.resolve(load_job(arguments.job, arguments.set))
    name = f"{job.name}-chaos-{arguments.seed}"
    _check_new(job.run_dir.with_name(f"{name}-1"))
    end = time.monotonic() + 60 * arguments.minutes
    undisturbed = undisturbed_run(job)
    dataset = open_dataset(
        prepare_dataset(job.data, undisturbed.run_dir.parent / DATA_FOLDER).folder
    )
    base = prepared(undisturbed)
    round_number, problems = 0, 0
    while round_number == 0 or time.monotonic() < end:
        round_number += 1
        schedule = ChaosSchedule.draw(base, arguments.seed, round_number, arguments.faults)
        spec = schedule.disturbed(base, f"{name}-{round_number}")
        print(f"Round {round_number}: {spec.name}", flush=True)
        problems += _round(schedule, spec, undisturbed, dataset)
    print(f"{round_number} rounds, {problems} claims that do not hold.")
    return 1 if problems else 0


def undisturbed_run(job: JobSpec) -> JobSpec:
    """Run the job without faults, unless that was done before; return it as it was run.

    Raises:
        PlatformError: It did not come to its end, or what a launch of the job is refused for.
    """
    preflight.check_job(job)  # as the user wrote it: the copies of it below spell defaults out
    _, workers = job.resources.bounds
    document = job.model_dump(mode="json")
    document["name"] = f"{job.name}-undisturbed"
    document["resources"]["workers"] = workers  # one mesh, so that results can be the same bits
    document["faults"]["inject"] = []
    document["export"]["registered_model"] = None
    spec = job_of(document, source=document["name"])
    preflight.check_storage(spec)
    preflight.check_earlier_run(spec)
    check_address(spec)
    print(f"{spec.name}: {spec.num_steps} steps on {workers} workers", flush=True)
    code = Launches(spec).run()
    if code != 0:
        raise PlatformError(
            f"The undisturbed run {spec.name} ended with exit code {code}, so there is nothing to "
            f"compare with; {spec.run_dir / LOG_FILE} says why."
        )
    return spec


def prepared(undisturbed: JobSpec) -> JobSpec:
    """Return the job with faults that are noticed soon and never too many."""
    records, _ = MetricsSpool(undisturbed.run_dir).read_from(0)
    seconds = [sum(v for k, v in r.metrics.items() if k.startswith(TIME)) for r in records[1:]]
    document = undisturbed.model_dump(mode="json")
    document["faults"] |= {
        "stall_s": max(LEAST_STALL_S, round(STALL_STEPS * max(seconds, default=0.0), 1)),
        "max_failures": MANY,
        "max_losses": MANY,
    }
    return job_of(document, source=undisturbed.name)


def _check_new(run_dir: Path) -> None:
    if run_dir.exists():
        raise SpecError(
            f"{run_dir} is there from an earlier chaos with this seed. Delete it, or give another "
            "--seed."
        )


def _round(schedule: ChaosSchedule, spec: JobSpec, undisturbed: JobSpec, dataset: Dataset) -> int:
    """Run the job once under its faults and print what came of it; return how much is wrong."""
    _check_new(spec.run_dir)
    launches = Launches(spec, schedule.driver_kills)
    code = launches.run()
    codes = ", ".join(map(str, launches.exit_codes))
    checks = [Check("the run comes to its end", [f"see {spec.run_dir / LOG_FILE}"] if code else [])]
    if code == 0:
        checks += compare(spec, undisturbed, dataset)
    checks.append(Check("nothing is left running", launches.left_running()))
    print(_happened(schedule, spec))
    print(f"launches ended with {codes}\n{_verdicts(checks)}", flush=True)
    return sum(not check.holds for check in checks)


def _happened(schedule: ChaosSchedule, spec: JobSpec) -> str:
    planned = [(str(f.kind), f.step, f"rank {f.rank}") for f in schedule.inject]
    planned += [(KILL_DRIVER, step, "the driver") for step in schedule.driver_kills]
    struck = [e for e in Journal(spec.run_dir).read() if e["kind"] == "fault_injected"]
    where = {(event["fault"], event["on"]): event["step"] for event in struck}
    rows = [
        (kind, step, on, where.get((kind, on), "never"))
        for kind, step, on in sorted(planned, key=lambda each: each[1])
    ]
    return text_table(("fault", "from step", "on", "struck in step"), rows)


def _verdicts(checks: Sequence[Check]) -> str:
    lines = []
    for check in checks:
        lines.append(f"{'ok    ' if check.holds else 'FAILED'}  {check.claim}")
        lines += [f"          {each}" for each in check.against[:3]]
        if len(check.against) > 3:
            lines.append(f"          and {len(check.against) - 3} more")
    return "\n".join(lines)
