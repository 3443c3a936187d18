"""A short chaos, and the recovery benchmark, as a user runs them."""

import json

import pytest
from cluster import driver
from dmuon_platform.events import Journal
from dmuon_platform.recoveries import recoveries

pytestmark = pytest.mark.cluster

SEED = 246
"""Draws the kinds below."""

KINDS = {"freeze", "kill_driver", "kill_during_save", "save_error"}


def test_a_job_survives_a_seeded_chaos_and_its_way_back_from_a_fault_is_timed(text, tmp_path):
    """Both commands compare with an undisturbed run, which the second finds made by the first."""
    job = driver.make_run(tmp_path, text).job
    chaos = driver.start("chaos", job, "--minutes", "0.01", "--seed", SEED, "--faults", len(KINDS))
    undisturbed = driver.Run(job, tmp_path / "runs" / "small-undisturbed")
    driver.wait_until(lambda: undisturbed.events("ended"), chaos)
    bench = driver.start("bench-recovery", job, "--kinds", "kill", "--json")
    code, output = driver.finish(chaos)
    assert code == 0, output
    assert "1 rounds, 0 claims that do not hold." in output
    assert output.count("\nok ") == 7
    folder = tmp_path / "runs" / f"small-chaos-{SEED}-1"
    events = Journal(folder).read()
    assert {event["fault"] for event in events if event["kind"] == "fault_injected"} == KINDS
    steps = [(r["step"], r["time"]) for r in driver.Run(job, folder).lines("metrics.jsonl")]
    found = recoveries(events, steps)
    assert {each.fault for each in found} == KINDS - {"save_error"}
    assert all(
        min(each.detection_s, each.restart_s, each.restore_s, each.first_step_s) > 0
        for each in found
    )

    again, output = driver.run("chaos", job, "--seed", SEED)  # would go on with what is there
    assert again == 78
    assert "give another --seed" in output

    code, output = driver.finish(bench)
    assert code == 0, output
    _check_times_of_a_kill(json.loads(output[output.index("[") :]))
    assert len(undisturbed.events("launched")) == 1
    code, output = driver.run("bench-recovery", job, "--kinds", "kill,slow")
    assert code == 78
    assert "slow is none" in output


def _check_times_of_a_kill(told):
    (kill,) = told
    parts = [kill[each] for each in ("detection_s", "restart_s", "restore_s", "first_step_s")]
    assert (kill["fault"], kill["step"]) == ("kill", 30)
    assert min(parts) > 0
    assert kill["total_s"] == pytest.approx(sum(parts))
