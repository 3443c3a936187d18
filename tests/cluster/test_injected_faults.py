"""``faults.inject`` under real Ray: one thing after another breaks, and nothing of it is left."""

from pathlib import Path

import pytest
from cluster import driver
from dmuon_platform.data import open_dataset
from dmuon_platform.run_comparison import compare
from dmuon_platform.spec import JobSpec, load_job
from worker_runs import run_on_forked_ranks

pytestmark = pytest.mark.cluster

STALL = '{kind = "stall", step = 7, rank = 1}'
NAN = '{kind = "nan", step = 14, rank = 1}'
NO_SAVES = '{kind = "save_error", step = 15, rank = 1, times = 2}'
STOP = '{kind = "sigterm", step = 42, rank = 1}'
FREEZE = '{kind = "freeze", step = 46, rank = 1}'
INF = '{kind = "inf", step = 55, rank = 1}'

SKIP = 'faults.non_finite="skip"'
ROLL_BACK = 'faults.non_finite="roll_back"'


def inject(*faults: str) -> str:
    return f"faults.inject=[{', '.join(faults)}]"


def on_forked_ranks(run: driver.Run, data: Path) -> JobSpec:
    """Train without Ray, with the faults that change the weights and no others."""
    for settings in ([SKIP, inject(NAN, STOP)], [ROLL_BACK, inject(INF)]):
        spec = load_job(run.job, ["name=expected", *settings])
        run_on_forked_ranks(spec, data)
    return spec


def test_what_breaks_leaves_no_trace_but_the_steps_that_it_had_to_change(text, tmp_path):
    """Launched twice: what should notice a stuck rank differs, and what no number is answered by.

    First the pulse has to, before the others' collective; then that, before the pulse.
    """
    run = driver.make_run(tmp_path, text)
    settings = ["faults.stall_s=8", SKIP, inject(STALL, NAN, NO_SAVES, STOP)]
    code, output = driver.run("run", run.job, *driver.settings(*settings))
    assert code == 75, output
    settings = ["faults.timeout_s=15", ROLL_BACK, inject(FREEZE, INF)]
    code, output = driver.run("run", run.job, *driver.settings(*settings))
    assert code == 0, output

    stalled, hung = run.events("restarted")
    pids = [[each["pid"] for each in e["workers"]] for e in run.events("training_started")]
    assert f"Stuck: rank 1 (process {pids[0][1]} on " in stalled["cause"]
    assert "in phase data of step 7" in stalled["cause"]
    loader = (run.folder / "stacks/attempt-1-rank-00001.txt").read_text()
    assert "in read_with_faults" in loader
    assert f"Stuck: rank 1 (process {pids[2][1]} on " in hung["cause"]
    assert "Timed out waiting 15000ms" in hung["details"]
    (dropped,) = run.events("update_dropped")
    assert (dropped["step"], dropped["attempt"]) == (14, 2)
    (back,) = run.events("rolled_back")
    assert (back["step"], back["to_step"]) == (55, 50)
    assert (back["first_batch"], back["last_batch"]) == (50, 54)
    assert [event["step"] for event in run.events("checkpoint_failed")] == [20, 30]
    saved = [event["step"] for event in run.events("checkpoint_saved")]
    (stopped,) = run.events("stopped")
    assert saved == [10, 40, stopped["step"], 50, 60]
    assert not any(replay["replay"] for replay in run.replays())

    (data,) = (run.folder.parent / "data").glob("*/")
    expected, dataset = on_forked_ranks(run, data), open_dataset(data)
    checks = compare(load_job(run.job), expected, dataset)
    assert not [check for check in checks if not check.holds]
