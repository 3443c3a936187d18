"""A run looks at its updates when it says so, loses no line in a resume, and trains the same."""

import math
from pathlib import Path

from dmuon_platform.events import Journal
from dmuon_platform.spec import JobSpec
from dmuon_platform.spool import MetricsSpool
from dmuon_platform.update_table import UPDATES_FILE, UpdateTable
from ranks_runner import run_ranks
from worker_runs import ask_to_stop, run_worker, worker_job

STEPS, EVERY = 12, 5


def tables(spec: JobSpec) -> dict[int, UpdateTable]:
    records, _ = MetricsSpool(spec.run_dir, UPDATES_FILE).read_from(0)
    found = {record.step: UpdateTable.from_metrics(record.metrics) for record in records}
    assert len(found) == len(records), "each step once"
    return {step: table for step, table in found.items() if table is not None}


def metrics_of(spec: JobSpec, *starts: str) -> dict[int, dict[str, float]]:
    return {
        record.step: {k: v for k, v in record.metrics.items() if k.startswith(starts)}
        for record in MetricsSpool(spec.run_dir).read_from(0)[0]
    }


def test_looking_at_updates_changes_no_bit_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    plain = worker_job(tmp_path, "plain", tracking__update_statistics_every=None)
    watched = worker_job(
        tmp_path, "watched", tracking__update_statistics_every=EVERY, checkpoint__every=3
    )

    def first(rank: int) -> None:
        run_worker(plain)
        stops = {"at_step": 6, "action": lambda: ask_to_stop(watched, "half")} if not rank else {}
        assert "stopped" in run_worker(watched, **stops)

    def second(rank: int) -> None:
        run_worker(watched, attempt=2)

    run_ranks(2, first)
    run_ranks(2, second)

    assert not (plain.run_dir / UPDATES_FILE).exists()
    computed = ("train/", "evaluation/")
    assert metrics_of(watched, *computed) == metrics_of(plain, *computed)
    (one,), (other,) = (
        [e for e in Journal(s.run_dir).read() if e["kind"] == "trained"] for s in (plain, watched)
    )
    assert one["weights_sha256"] == other["weights_sha256"]
    assert MetricsSpool(watched.run_dir).continuation().different == 0

    seen = tables(watched)
    assert list(seen) == [1, 5, 10, 12]
    plan = Journal(watched.run_dir).last("training_started")["plan"]
    assert all(len(each.rows) == sum(plan["num_matrices_per_owner"]) for each in seen.values())
    summaries = {step: each for step, each in metrics_of(watched, "muon/").items() if each}
    assert summaries == {step: table.summary() for step, table in seen.items()}
    low, high = seen[12].band
    for row in seen[12].rows.values():
        assert 0.9 * low < row.spectral_norm < 1.1 * high
        assert 0 < row.update_to_weight < math.inf
