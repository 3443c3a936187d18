"""A rank that is stuck, and a request to stop, in real trainings on forked ranks."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from dmuon_platform.assembly import assemble
from dmuon_platform.data import Dataset, open_dataset
from dmuon_platform.events import Journal
from dmuon_platform.heartbeat import Heartbeats, Phase
from dmuon_platform.place import Place
from dmuon_platform.pulse import Pulse, catch_sigterm
from dmuon_platform.record import Record
from dmuon_platform.saving import Saving
from dmuon_platform.spec import JobSpec, job_of
from dmuon_platform.stall import stuck_ranks
from dmuon_platform.stop_request import After, StopFile, StopRequest
from dmuon_platform.store import CheckpointStore
from dmuon_platform.training import Training
from dmuon_platform.worker import train
from ranks_runner import run_ranks
from small_job import small
from unit.data_builders import build

STALL_S = 1.0


class Alone(Saving):
    """Saving without a Ray to mirror to."""

    def _mirror(self, step: int, path: Path) -> None:
        pass


class Watched(Dataset):
    """The dataset, with something that happens when a rank reads its samples of a step."""

    def then(self, at_step: int, action: Any) -> "Watched":
        self._at_step, self._action = at_step, action
        return self

    def batch(self, step: int, *arguments: Any) -> Any:
        if step == self._at_step:
            self._action()
        return super().batch(step, *arguments)


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    build(tmp_path / "data", [bytes([65 + i % 26]) * (i % 50 + 1) for i in range(60)])
    model = {
        "vocab_size": 257,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    spec = job_of(
        small(
            storage=str(tmp_path),
            model=model,
            data__sequence_length=8,
            train__steps=12,
            train__global_batch_size=4,
            train__micro_batch_size=1,
            resources={"workers": 2},
            faults={"stall_s": STALL_S, "slow_stall_s": 30},
        )
    )
    spec.run_dir.mkdir()
    return spec


def run_worker(spec: JobSpec, at_step: int = -1, action: Any = None) -> dict[str, Any]:
    """What a worker does, without Ray; ``action`` happens in this rank's loader."""
    place = Place.take(spec)
    with Pulse(spec.run_dir, spec.faults, place, 1, "launch") as pulse:
        model, optimizer, plan = assemble(spec, place)
        dataset = open_dataset(spec.run_dir.parent / "data")
        dataset.__class__ = Watched
        dataset.then(at_step, action)
        training = Training(spec, place, model, optimizer, dataset, pulse.at)
        saving = Alone(spec, place, 1, {}, pulse.at)
        return train(spec, training, saving, pulse, Record(spec, place, 1), plan)


def _digest(spec: JobSpec) -> str:
    return Journal(spec.run_dir).last("trained")["weights_sha256"]


@pytest.mark.parametrize("how", ["loader", "frozen"])
def test_the_rank_that_the_others_wait_for_is_named_and_its_stack_kept(spec, how):
    def body(rank: int) -> None:
        actions = {"loader": time.sleep, "frozen": lambda s: os.kill(os.getpid(), signal.SIGSTOP)}
        run_worker(spec, 3 if rank == 1 else -1, lambda: actions[how](60))

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
        with Pulse(spec.run_dir, spec.faults, place, 1, "launch") as pulse:
            time.sleep(2 * STALL_S)  # imports
            pulse.at(Phase.DATA, 0)
            pulse.at(Phase.COMPUTE)
            time.sleep(2 * STALL_S)  # compiles
            for _ in range(2):
                pulse.at(Phase.SAVE)
                time.sleep(2 * STALL_S)
            for _ in range(4):
                pulse.at(Phase.COMPUTE)
                time.sleep(0.6 * STALL_S)

    run_ranks(2, body)
    assert not any(beat.is_stuck for beat in Heartbeats(spec.run_dir).read())
    assert not (spec.run_dir / "stacks").exists()


@pytest.mark.parametrize("how", ["file", "sigterm"])
def test_a_request_stops_all_ranks_after_the_same_step_with_a_checkpoint(spec, how):
    def ask() -> None:
        if how == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            StopFile(spec.run_dir).write(StopRequest.now("launch", "maintenance"))
            time.sleep(1.0)  # until rank 0 has looked

    def first(rank: int) -> None:
        catch_sigterm()
        stopped = run_worker(spec, 3 if rank == 1 else -1, ask)["stopped"]
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
    other = spec.model_copy(update={"name": "undisturbed"})
    other.run_dir.mkdir()
    run_ranks(2, lambda rank: run_worker(other))
    assert _digest(spec) == _digest(other)
