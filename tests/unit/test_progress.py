"""What the person who launched a job sees: this launch's steps, and how long they will take."""

import io
import math
import re
import time
from functools import partial

import pytest
from dmuon_platform import launch
from dmuon_platform.events import Journal
from dmuon_platform.progress import ProgressView
from dmuon_platform.spec import JobSpec, job_of
from dmuon_platform.spool import MetricsSpool
from dmuon_platform.store import CheckpointStore
from rich.console import Console
from small_job import small


class Launch:
    """A training that takes a second a step, as it is seen every half a second."""

    def __init__(self, spec: JobSpec, *, terminal: bool = False) -> None:
        self.now = 0.0
        self.out = io.StringIO()
        self._journal = Journal(spec.run_dir)
        self._spool = MetricsSpool(spec.run_dir)
        console = Console(file=self.out, force_terminal=terminal, width=200)
        self.view = ProgressView(spec, console, lambda: self.now)

    def start(self, step: int) -> None:
        self._journal.append("training_started", step=step, workers=[{}, {}])

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.now += 1.0
            metrics = {"train/loss": 100 / step, "speed/tokens_per_s": 1.0}
            self._spool.append(step, metrics, time.time())
            self.view.refresh()

    def roll_back(self, step: int, target: int) -> None:
        self._spool.forget(target)
        facts = {"loss": math.nan, "grad_norm": 1.0, "first_batch": 5, "last_batch": 9}
        self._journal.append("rolled_back", step=step, to_step=target, **facts)

    def steps(self) -> list[str]:
        return re.findall(r"step (\d+)/100", self.out.getvalue())


@pytest.fixture
def spec(tmp_path) -> JobSpec:
    return job_of(small(storage=str(tmp_path), train__steps=100))


def test_a_resumed_run_shows_its_own_steps_alone_and_the_time_they_take(spec):
    before = Launch(spec)
    with before.view:
        before.start(0)
        before.train(1, 37)
    again = Launch(spec)
    with again.view:
        for _ in range(40):  # Ray starts
            again.now += 1.0
            again.view.refresh()
        assert again.out.getvalue() == ""
        assert again.view.step == 37
        again.start(30)
        again.train(31, 60)
        assert again.view.step == 60
    lines = again.out.getvalue().splitlines()
    assert lines[0] == "2 workers train from step 30"
    assert lines[1] == "step 38/100  loss 2.632  1 tokens/s"
    assert lines[2] == "step 43/100  loss 2.326  1 tokens/s  57 s left"
    assert lines[-1].startswith("step 60/100")


def test_the_last_step_is_shown_once_however_short_before_it_the_last_line_was(spec):
    launch = Launch(spec)
    with launch.view:
        launch.start(0)
        launch.train(1, 100)
    assert launch.steps()[-1] == "100"
    assert len(set(launch.steps())) == len(launch.steps())


def test_a_restart_is_shown_with_its_cause_and_its_pause_is_no_pace(spec):
    launch = Launch(spec)
    with launch.view:
        launch.start(0)
        launch.train(1, 20)
        Journal(spec.run_dir).append("restarted", step=20, cause="rank 1 died")
        launch.view.refresh()
        launch.now += 1000.0
        launch.start(20)
        launch.train(21, 50)
    text = launch.out.getvalue()
    assert "restart after step 20: rank 1 died" in text
    assert re.search(r"step 46/100 .* restarts 1  54 s left", text)
    assert max(int(left) for left in re.findall(r"(\d+) s left", text)) < 100


def test_steps_seen_before_the_event_of_their_attempt_are_not_taken_back(spec):
    launch = Launch(spec)
    with launch.view:
        later = time.time() + 10
        metrics = {"train/loss": 1.0, "speed/tokens_per_s": 1.0}
        MetricsSpool(spec.run_dir).append(31, metrics, later)
        launch.view.refresh()
        launch.start(30)
        launch.view.refresh()
        assert launch.view.step == 31


def test_a_terminal_gets_the_same_pace(spec):
    launch = Launch(spec, terminal=True)
    with launch.view:
        launch.now += 500.0
        launch.start(0)
        launch.train(1, 50)
    assert "50 s left" in launch.out.getvalue()


def test_an_evaluation_and_a_tracker_that_is_gone_are_said_at_once(spec):
    launch = Launch(spec)
    journal = Journal(spec.run_dir)
    with launch.view:
        launch.start(0)
        journal.append("evaluated", step=0, loss=3.25, bits_per_byte=2.0625)
        journal.append("tracking_failed", problem="http://far:5000 does not answer")
        launch.train(1, 9)
        journal.append("evaluated", step=9, loss=2.0)
        journal.append("tracking_works", uri="http://far:5000")
        launch.view.refresh()
    lines = [line for line in launch.out.getvalue().splitlines() if not line.startswith("step")]
    assert lines[1:] == [
        "evaluation before the first step: loss 3.2500, 2.062 bits per byte",
        "MLflow does not hear of everything now: http://far:5000 does not answer; the run goes "
        "on, and the rest is told when it can be",
        "evaluation after step 9: loss 2.0000",
        "MLflow has been told everything again: http://far:5000",
    ]


def test_what_becomes_of_steps_that_do_not_count_is_said(spec):
    launch = Launch(spec)
    journal = Journal(spec.run_dir)
    with launch.view:
        launch.start(0)
        launch.train(1, 9)
        journal.append("update_dropped", step=10, loss=math.nan, grad_norm=1.0)
        launch.roll_back(10, 5)
        launch.train(6, 8)
        assert launch.view.step == 8
    said = launch.out.getvalue()
    assert "the update of step 10 was dropped: loss nan, gradient norm 1.0" in said
    assert "went back from step 10 to 5" in said
    assert "batches 5 to 9 are left out" in said


def test_what_is_damaged_at_the_end_is_said_in_a_sentence_unless_the_workers_have(spec):
    folder = spec.run_dir / "checkpoints" / "step-00000009.writing-a0"
    folder.mkdir(parents=True)
    journal, out = Journal(spec.run_dir), io.StringIO()
    for _ in range(2):
        tell = partial(launch._tell_damage, journal, Console(file=out, width=500))
        assert CheckpointStore(spec.run_dir, tell).newest_verified() is None
    (line,) = out.getvalue().splitlines()
    assert line.startswith(f"{folder} is not a whole checkpoint: it was never committed")
    assert [event["kind"] for event in journal.read()] == ["checkpoint_damaged"]
