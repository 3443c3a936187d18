"""Faults made on purpose, and what the run does about them, in real trainings on forked ranks."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from dmuon_platform.events import Journal
from dmuon_platform.pulse import catch_sigterm
from dmuon_platform.spec import JobSpec
from dmuon_platform.store import CheckpointStore
from ranks_runner import run_ranks
from worker_runs import run_worker, samples_read, worker_job

STEPS = 12
STALL_S = 3.0
"""Where a rank is made to be stuck; elsewhere none is, however busy the machine."""


def job(folder: Path, *inject: dict[str, Any], name: str = "faulty", **faults: Any) -> JobSpec:
    return worker_job(
        folder,
        name,
        train__steps=STEPS,
        checkpoint={"every": 4, "keep_last": 10},
        resources={"workers": 2},
        faults={**faults, "inject": list(inject)},
    )


def train(spec: JobSpec) -> None:
    """One attempt on two ranks."""
    attempt = CheckpointStore(spec.run_dir).acquire_attempt()
    run_ranks(2, lambda rank: run_worker(spec, attempt) and None, timeout_s=120)


def fails(spec: JobSpec, match: str = "died without a traceback") -> None:
    with pytest.raises(AssertionError, match=match):
        train(spec)


def events(spec: JobSpec, kind: str) -> list[dict[str, Any]]:
    return [event for event in Journal(spec.run_dir).read() if event["kind"] == kind]


def trained(spec: JobSpec) -> tuple[str, float]:
    """The weights' digest and the last evaluation."""
    event = Journal(spec.run_dir).last("trained")
    return event["weights_sha256"], event["evaluation"]["evaluation/loss"]


def losses(spec: JobSpec) -> dict[int, float]:
    """The loss of each step, as it counts."""
    lines = [json.loads(line) for line in (spec.run_dir / "metrics.jsonl").read_text().splitlines()]
    whole = [line for line in lines if "step" in line and "replay" not in line]
    return {line["step"]: line["metrics"]["train/loss"] for line in whole}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    spec = job(tmp_path_factory.mktemp("undisturbed"))
    train(spec)
    return spec


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "kill", "step": 6, "rank": 1},
        {"kind": "raise", "step": 6},
        {"kind": "freeze", "step": 6, "rank": 1},
        {"kind": "stall", "step": 6, "rank": 1},
        {"kind": "kill_during_save", "step": 7},
        {"kind": "corrupt_checkpoint", "step": 6, "rank": 1},
    ],
    ids=lambda fault: fault["kind"],
)
def test_a_fault_ends_an_attempt_once_and_the_next_one_comes_to_the_same_weights(
    undisturbed, tmp_path, fault
):
    stuck = {"stall_s": STALL_S} if fault["kind"] in ("freeze", "stall") else {}
    spec = job(tmp_path, fault, **stuck)
    fails(spec, "injected by faults.inject: raise-step-6-rank-0|died without a traceback")
    if fault["kind"] == "kill_during_save":
        assert any((spec.run_dir / "checkpoints/step-00000008.writing-a1").iterdir())
    saved = [0, *(each.step for each in CheckpointStore(spec.run_dir).list())]
    train(spec)
    assert trained(spec) == trained(undisturbed)
    assert losses(spec) == losses(undisturbed)
    (event,) = events(spec, "fault_injected")
    assert (event["fault"], event["attempt"]) == (fault["kind"], 1)
    assert event["on"] == f"rank {fault.get('rank', 0)}"
    starts = [event["step"] for event in events(spec, "training_started")]
    is_corrupt = fault["kind"] == "corrupt_checkpoint"
    assert starts == [0, saved[-2 if is_corrupt else -1]]
    damaged = " ".join(event["damage"] for event in events(spec, "checkpoint_damaged"))
    if is_corrupt:
        assert f"step-{saved[-1]:08d} is not a whole checkpoint: model-" in damaged
    if fault["kind"] == "kill_during_save":
        assert saved[-1] < 8
        assert "step-00000008.writing-a1" in damaged


def test_a_fault_with_times_strikes_again_when_its_step_comes_again(tmp_path):
    spec = job(tmp_path, {"kind": "raise", "step": 3, "times": 2})
    fails(spec, "injected")
    fails(spec, "injected")
    train(spec)
    assert [event["attempt"] for event in events(spec, "fault_injected")] == [1, 2]


def test_faults_that_nothing_ends_by_leave_no_trace_in_the_result(undisturbed, tmp_path):
    """A save that the kernel refuses on one rank, and a slow rank; the next save is good."""
    spec = job(
        tmp_path,
        {"kind": "save_error", "step": 5, "rank": 1},
        {"kind": "slow", "step": 2, "rank": "all", "seconds": 0.2},
    )
    train(spec)
    assert trained(spec) == trained(undisturbed)
    (failed,) = events(spec, "checkpoint_failed")
    assert failed["step"] == 8
    assert "File too large" in failed["problem"]
    assert [each.step for each in CheckpointStore(spec.run_dir).list()] == [4, 12]
    injected = sorted((e["fault"], e["on"]) for e in events(spec, "fault_injected"))
    assert injected == [("save_error", "rank 1"), ("slow", "rank 0"), ("slow", "rank 1")]


def test_a_sigterm_on_purpose_stops_the_run_with_a_checkpoint(tmp_path):
    spec = job(tmp_path, {"kind": "sigterm", "step": 3, "rank": 1})

    def body(rank: int) -> None:
        catch_sigterm()
        assert run_worker(spec, 1)["stopped"]["reason"] == "rank 1 got SIGTERM"

    run_ranks(2, body)
    assert events(spec, "stopped")[0]["checkpoint"] in (3, 4)


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_by_default_a_non_finite_step_ends_the_run_and_nothing_of_it_is_kept(tmp_path, kind):
    spec = job(tmp_path, {"kind": kind, "step": 6, "rank": 1})
    fails(spec, "Diverged: Step 6 diverged: loss (nan|inf)")
    assert [each.step for each in CheckpointStore(spec.run_dir).list()] == [4]
    assert not events(spec, "update_dropped")


def test_a_skipped_step_leaves_the_weights_as_they_are_on_all_ranks(tmp_path, undisturbed):
    """The steps before are those of the undisturbed run; a restart comes to the same end."""
    nan = {"kind": "nan", "step": 6, "rank": 1}
    spec = job(tmp_path, nan, name="skipped", non_finite="skip")
    train(spec)
    again = job(tmp_path, nan, {"kind": "kill", "step": 8}, name="again", non_finite="skip")
    fails(again)
    again_losses = losses(again)
    train(again)
    (dropped,) = events(spec, "update_dropped")
    assert dropped["step"] == 6
    assert math.isnan(dropped["loss"])
    before = {step: loss for step, loss in losses(spec).items() if step < 6}
    assert before == {step: loss for step, loss in losses(undisturbed).items() if step < 6}
    assert losses(spec)[7] != losses(undisturbed)[7]
    assert losses(spec)[7] == again_losses[7]
    assert all(math.isfinite(loss) for step, loss in losses(spec).items() if step != 6)
    assert samples_read(spec, 1) == samples_read(undisturbed, 1)
    for each in CheckpointStore(spec.run_dir).list():
        assert all(math.isfinite(x) for x in each.manifest.extra["metrics"].values())


def test_steps_are_skipped_only_so_often_one_after_another(tmp_path):
    faults = [{"kind": "nan", "step": step} for step in (2, 4, 5, 7, 8, 9)]
    spec = job(tmp_path, *faults, non_finite="skip", max_skips=2)
    fails(spec, "Step 9 diverged as 2 before it")
    assert [event["step"] for event in events(spec, "update_dropped")] == [2, 4, 5, 7, 8]


def test_a_roll_back_leaves_out_the_samples_since_the_checkpoint_and_no_others(
    tmp_path, undisturbed
):
    nan = {"kind": "nan", "step": 6, "rank": 1}
    spec = job(tmp_path, nan, name="rolled", non_finite="roll_back")
    train(spec)
    (event,) = events(spec, "rolled_back")
    window = event["first_batch"], event["last_batch"]
    assert (event["step"], event["to_step"], *window) == (6, 4, 4, 5)
    read, plain = samples_read(spec, 1), samples_read(undisturbed, 1)
    assert {b: read[b] for b in range(6)} == {b: plain[b] for b in range(6)}
    assert sorted(read) == [*range(STEPS + 2)]  # batches: each once, two in vain
    counted = losses(spec)
    assert sorted(counted) == [*range(1, STEPS + 1)]
    assert counted[4] == losses(undisturbed)[4]
    assert counted[5] != losses(undisturbed)[5]

    # Whatever ends the run later, it comes to the same end.
    again = job(tmp_path, nan, {"kind": "kill", "step": 7}, name="a", non_finite="roll_back")
    fails(again)
    train(again)
    assert trained(again) == trained(spec)
    assert losses(again) == counted
    replays = [json.loads(x) for x in (again.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [x["replay"] for x in replays if "replay" in x] == [{}, {}]  # the same bits


def test_a_loss_spike_is_rolled_back_when_the_job_asks_for_it_and_before_it_is_applied(tmp_path):
    spike = {"kind": "spike", "step": 10, "factor": 50.0}
    ask = {"loss_spike": {"factor": 3.0, "window": 6}}
    spec = job(tmp_path, spike, name="asked", **ask)
    train(spec)
    (event,) = events(spec, "rolled_back")
    assert (event["step"], event["to_step"]) == (10, 8)
    assert event["loss"] > 50
    assert max(losses(spec).values()) < 7
    # Started again just before the spike, a run knows the losses that it is compared with.
    again = job(tmp_path, {"kind": "sigterm", "step": 8}, spike, name="again", **ask)
    run_ranks(2, lambda rank: catch_sigterm() or (run_worker(again) and None))
    train(again)
    (event,) = events(again, "rolled_back")
    assert (event["step"], event["to_step"]) == (10, 9)
    ignored = job(tmp_path, spike, name="ignored")
    train(ignored)
    assert not events(ignored, "rolled_back")


def test_roll_backs_end_when_there_is_no_checkpoint_or_they_do_not_help(tmp_path):
    early = job(tmp_path, {"kind": "inf", "step": 2}, name="early", non_finite="roll_back")
    fails(early, "before there was a checkpoint to go back to")
    nan = {"kind": "nan", "step": 6, "times": 3}
    spec = job(tmp_path, nan, name="often", non_finite="roll_back", max_skips=2)
    fails(spec, "after the checkpoint of step 4, as 2 times before")
    assert [e["last_batch"] for e in events(spec, "rolled_back")] == [5, 7]
