"""What the person who launched a job sees: this launch's steps, and how long they will take."""

import io
import math
import re
import signal
import time
from functools import partial

import pytest
from dmuon_platform import launch
from dmuon_platform.errors import GracefulStop
from dmuon_platform.events import Journal
from dmuon_platform.progress import ProgressView
from dmuon_platform.spec import JobSpec, job_of
from dmuon_platform.spool import MetricsSpool
from dmuon_platform.stop_request import After
from dmuon_platform.stop_signals import StopSignals
from dmuon_platform.store import CheckpointStore
from rich.console import Console
from small_job import small


class Launch:
    """A training that takes a second a step, as it is seen every half a second."""

    def __init__(
        self, spec: JobSpec, *, terminal: bool = False, width: int = 200, kind: str = "xterm"
    ) -> None:
        self.now = 0.0
        self.out = io.StringIO()
        self.journal = Journal(spec.run_dir)
        self._spool = MetricsSpool(spec.run_dir)
        environ = {"TERM": kind}
        console = Console(file=self.out, force_terminal=terminal, width=width, _environ=environ)
        self.view = ProgressView(spec, console, lambda: self.now)

    def start(self, step: int) -> None:
        self.journal.append("training_started", step=step, workers=[{}, {}])

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.now += 1.0
            metrics = {"train/loss": 100 / step, "speed/tokens_per_s": 1.0}
            self._spool.append(step, metrics, time.time())
            self.view.refresh()

    def roll_back(self, step: int, target: int) -> None:
        self._spool.forget(target)
        facts = {"loss": math.nan, "grad_norm": 1.0, "first_batch": 5, "last_batch": 9}
        self.journal.append("rolled_back", step=step, to_step=target, **facts)

    def stop(self, step: int, after: After) -> str:
        """Have a request to stop honoured; return what is drawn from that line on."""
        self.journal.append("stopped", step=step, reason="SIGINT", after=after)
        self.view.refresh()
        self.train(step + 1, step + 9)
        self.view.say("the last word")  # and with it the bar is drawn, where there is one
        return self.out.getvalue().partition(f"stopped after step {step}: SIGINT")[2]

    def plain(self) -> str:
        """Return what was printed, without colours and movements of the cursor."""
        return re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", self.out.getvalue())

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
        launch.view.say("half way")  # and with it the bar is drawn
        assert "50 s left" in launch.out.getvalue()


def test_a_terminal_is_told_while_workers_are_started(spec):
    launch = Launch(spec, terminal=True)
    with launch.view:
        launch.view.say("first")  # and with it the bar is drawn
        assert "0/100  starting workers" in launch.plain()
        launch.start(0)
        launch.train(1, 20)
        launch.out.truncate(launch.out.seek(0))
        launch.view.say("meanwhile")
        assert "starting workers" not in launch.plain()
        launch.journal.append("restarted", step=20, cause="rank 1 died")
        launch.view.refresh()
        launch.view.say("again")
        assert "20/100  starting workers" in launch.plain()


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_is_drawn_after_the_word_that_the_run_has_stopped(spec, terminal):
    launch = Launch(spec, terminal=terminal)
    with launch.view:
        launch.start(0)
        launch.train(1, 13)
        shown = launch.stop(13, After.END)
        assert launch.view.step == 22
    assert shown == "\nthe last word\n"
    assert launch.out.getvalue().endswith(shown)
    last = launch.plain().partition("stopped after")[0].rstrip().splitlines()[-1]
    assert "13/100  loss 7.692  1 tokens/s" in last
    assert "left" not in last


def test_the_bar_ends_with_the_answer_to_who_stops_the_run(spec):
    launch = Launch(spec, terminal=True, width=20)
    signals = StopSignals(spec.run_dir, "launch", launch.view.say)
    stopped = pytest.raises(GracefulStop)
    with stopped, signals, launch.view, signals.training(launch.view.end):
        launch.start(0)
        launch.train(1, 9)
        signal.raise_signal(signal.SIGINT)
        launch.train(10, 12)
    assert launch.out.getvalue().endswith("Ctrl-C now ends it at once\n")
    assert "9/100" in launch.plain().partition("Ctrl-C: stopping")[0].splitlines()[-1]


def test_a_terminal_that_cannot_draw_over_a_line_gets_plain_lines(spec):
    launch = Launch(spec, terminal=True, kind="dumb")
    with launch.view:
        launch.start(0)
        launch.train(1, 6)
    assert launch.steps() == ["1", "6"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_that_goes_on_with_other_workers_is_shown_on(spec, terminal):
    launch = Launch(spec, terminal=terminal)
    with launch.view:
        launch.start(0)
        launch.train(1, 13)
        assert re.search(r"\d+/100", launch.stop(13, After.RESTART))


def test_the_bar_does_not_outlive_a_ctrl_c_that_comes_while_it_ends(spec, monkeypatch):
    launch = Launch(spec, terminal=True)

    def interrupted(*, last: bool = False) -> None:
        raise KeyboardInterrupt

    def train_and_end() -> None:
        with launch.view:
            launch.start(0)
            launch.train(1, 9)
            monkeypatch.setattr(launch.view, "refresh", interrupted)

    with pytest.raises(KeyboardInterrupt):
        train_and_end()
    shown = launch.out.getvalue()
    launch.view.say("the last word")
    assert launch.out.getvalue() == shown + "the last word\n"


PARTS = {
    "step": "50/100",
    "loss": "loss 2.000",
    "left": "50 s left",
    "speed": "1 tokens/s",
    "bar": "\N{BOX DRAWINGS HEAVY HORIZONTAL}",
    "checkpoint": "checkpoint 40",
    "restarts": "restarts 1",
    "name": "small",
    "elapsed": "0:00:50",
}


@pytest.mark.parametrize("width", [7, 17, 18, 19, 30, 40, 60, 80, 94, 95, 120, 200])
def test_a_narrow_terminal_gets_whole_parts_the_most_important_first(spec, width):
    launch = Launch(spec, terminal=True, width=width)
    with launch.view:
        launch.start(0)
        launch.train(1, 20)
        launch.journal.append("checkpoint_saved", step=40)
        launch.journal.append("restarted", step=20, cause="x")
        launch.start(20)
        launch.train(21, 50)
        launch.out.truncate(launch.out.seek(0))
        launch.view.say("")  # and with it the bar is drawn
        drawn = launch.plain().splitlines()[-1]
    assert len(drawn) <= width
    shown = [name for name, text in PARTS.items() if text in drawn]
    assert shown == list(PARTS)[: len(shown)]
    bar = re.escape(PARTS["bar"])
    whole = "|".join(
        [*(re.escape(PARTS[name]) for name in shown), f"({bar}|\u2578|\u257a){{10,40}}"]
    )
    assert re.fullmatch(rf" ?({whole})(  +({whole}))*", drawn), "no part is cut"
    if len(shown) < len(PARTS):
        needed = [*shown, list(PARTS)[len(shown)]]
        texts = [" 50/100", *(PARTS[name] for name in needed if name not in ("step", "bar"))]
        columns = sum(len(text) + 2 for text in texts) - 2 + 12 * ("bar" in needed)
        assert columns > width, "what fits is shown"


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
