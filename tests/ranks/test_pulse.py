"""A rank that is stuck, and a request to stop, in real trainings on forked ranks."""

import os
import signal
import time
from pathlib import Path

import pytest
from dmuon_platform.events import Journal
from dmuon_platform.heartbeat import Heartbeats, Phase
from dmuon_platform.place import Place
from dmuon_platform.pulse import Pulse, catch_sigterm
from dmuon_platform.spec import JobSpec
from dmuon_platform.stall import stuck_ranks
from dmuon_platform.stop_request import After, StopFile
from dmuon_platform.store import CheckpointStore
from ranks_runner import run_ranks
from worker_runs import LAUNCH, ask_to_stop, run_worker, worker_job

STALL_S = 2.0


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    return worker_job(tmp_path, faults={"stall_s": STALL_S, "slow_stall_s": 60})


@pytest.mark.parametrize("how", ["loader", "frozen"])
def test_the_rank_that_the_others_wait_for_is_named_and_its_stack_kept(spec, how):
    def body(rank: int) -> None:
        actions = {"loader": time.sleep, "frozen": lambda s: os.kill(os.getpid(), signal.SIGSTOP)}
        run_worker(spec, 1, 3 if rank == 1 else -1, lambda: actions[how](60))

    with pytest.raises(AssertionError, match="died without a traceback"):
        run_ranks(2, body)
    beats = Heartbeats(spec.run_dir).read()
    assert len(beats) == 2
    assert beats[0].is_stuck
    assert [beat.rank for beat in stuck_ranks(beats, STALL_S / 4)] == [1]
    assert (beats[0].step, beats[0].phase) == (3, Phase.COMPUTE)
    stacks = {path.name: path.read_text() for path in (spec.run_dir / "stacks").iterdir()}
    assert "in _forward_backward" in stacks["attempt-1-rank-00000.txt"]
    if how == "loader":
        assert beats[1].phase == Phase.DATA
        assert "in batch" in stacks["attempt-1-rank-00001.txt"]


def test_what_is_slow_but_comes_forward_is_not_stuck(spec):
    """A slow first phase of each kind, and steps that are slower than the limit as a whole."""

    def body(rank: int) -> None:
        place = Place.take(spec)
        with Pulse(spec.run_dir, spec.faults, place, 1, LAUNCH) as pulse:
            time.sleep(2 * STALL_S)  # imports
            pulse.at(Phase.DATA, 0)
            pulse.at(Phase.COMPUTE)
            time.sleep(2 * STALL_S)  # compiles
            for _ in range(2):
                pulse.at(Phase.SAVE)
                time.sleep(2 * STALL_S)
            for _ in range(15):
                pulse.at(Phase.COMPUTE)
                time.sleep(0.1 * STALL_S)

    run_ranks(2, body)
    assert not any(beat.is_stuck for beat in Heartbeats(spec.run_dir).read())
    assert not (spec.run_dir / "stacks").exists()


@pytest.mark.parametrize("how", ["file", "sigterm"])
def test_a_request_stops_all_ranks_after_the_same_step_with_a_checkpoint(spec, tmp_path, how):
    def ask() -> None:
        if how == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            ask_to_stop(spec, "maintenance")

    def first(rank: int) -> None:
        catch_sigterm()
        stopped = run_worker(spec, 1, 3 if rank == 1 else -1, ask)["stopped"]
        assert stopped["step"] == 5  # the flag rides on the step after the one in which it came
        assert stopped["after"] == After.END
        assert stopped["reason"] == ("maintenance" if how == "file" else "rank 1 got SIGTERM")

    def second(rank: int) -> None:
        StopFile(spec.run_dir).remove()
        assert run_worker(spec)["step"] == 12

    run_ranks(2, first)
    (event,) = [e for e in Journal(spec.run_dir).read() if e["kind"] == "stopped"]
    (checkpoint,) = CheckpointStore(spec.run_dir).list()
    assert event["step"] == event["checkpoint"] == checkpoint.step == 5
    run_ranks(2, second)
    other = worker_job(tmp_path, "undisturbed")
    run_ranks(2, lambda rank: run_worker(other))
    digests = [Journal(each.run_dir).last("trained")["weights_sha256"] for each in (spec, other)]
    assert digests[0] == digests[1]
