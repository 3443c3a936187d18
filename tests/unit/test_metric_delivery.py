"""Every point arrives once, wherever the drain is killed and whatever the server answers."""

from dmuon_platform.metric_delivery import MetricDelivery
from dmuon_platform.run_story import plans_of, restarts_of, tags_of
from dmuon_platform.spool import Continuation, MetricsSpool
from hypothesis import given
from hypothesis import strategies as st


class Killed(BaseException):
    """What the process does not survive."""


class Tracker:
    """Keeps every point it is told, and fails when told to, before or after keeping them."""

    def __init__(self) -> None:
        self.points: list[tuple[str, int, float]] = []
        self.fate = "answer"

    def log_metrics(self, metrics):
        if self.fate == "refuse":
            raise ConnectionError
        half = metrics[: len(metrics) // 2] if self.fate == "half" else metrics
        self.points += [(each.key, each.step, each.value) for each in half]
        if self.fate in ("lose the answer", "half"):
            raise ConnectionError

    def steps_of(self, key):
        return {step for name, step, _ in self.points if name == key}


FATES = st.sampled_from(["answer", "refuse", "lose the answer", "half", "die", "restart"])


@given(fates=st.lists(FATES, max_size=12), per_round=st.integers(0, 3))
def test_every_point_arrives_once(tmp_path_factory, fates, per_round):
    spool = MetricsSpool(tmp_path_factory.mktemp("run"))
    tracker = Tracker()
    offsets = [0]
    step = 0
    delivery = MetricDelivery(spool, tracker, 0, offsets.append)
    for fate in [*fates, "answer"]:
        for _ in range(per_round):
            step += 1
            spool.append(step, {"train/loss": 1 / step, "train/norm": 1.0}, 0.0)
        tracker.fate = fate

        def told(offset, fate=fate):
            if fate == "die":
                raise Killed
            offsets.append(offset)

        if fate in ("restart", "die"):
            delivery = MetricDelivery(spool, tracker, offsets[-1], told)
        try:
            delivery.deliver()
        except ConnectionError:
            pass
        except Killed:
            delivery = MetricDelivery(spool, tracker, offsets[-1], offsets.append)
    delivery = MetricDelivery(spool, tracker, offsets[-1], offsets.append)
    delivery.deliver()
    expected = [("train/loss", s, 1 / s) for s in range(1, step + 1)]
    expected += [("train/norm", s, 1.0) for s in range(1, step + 1)]
    assert sorted(tracker.points) == sorted(expected)


def test_a_step_that_two_attempts_wrote_at_once_arrives_once(tmp_path):
    one, other = MetricsSpool(tmp_path), MetricsSpool(tmp_path)
    one.append(1, {"train/loss": 1.0}, 0.0)
    other.append(2, {"train/loss": 0.5}, 0.0)
    one.append(2, {"train/loss": 0.5}, 0.0)  # does not see what the other has written since
    tracker = Tracker()
    delivery = MetricDelivery(MetricsSpool(tmp_path), tracker, 0, lambda offset: None)
    delivery.deliver()
    one.append(3, {"train/loss": 0.1}, 0.0)
    other.append(3, {"train/loss": 0.1}, 0.0)
    delivery.deliver()
    assert [step for _, step, _ in tracker.points] == [1, 2, 3]


def test_curves_can_be_thinned_and_evaluations_stay(tmp_path):
    spool = MetricsSpool(tmp_path)
    for step in range(1, 5):
        spool.append(step, {"train/loss": 1.0, "evaluation/loss": 2.0}, 0.0)
    tracker = Tracker()
    MetricDelivery(spool, tracker, 0, lambda offset: None, log_every=2).deliver()
    assert [step for key, step, _ in tracker.points if key == "train/loss"] == [2, 4]
    assert [step for key, step, _ in tracker.points if key == "evaluation/loss"] == [1, 2, 3, 4]


def test_attempts_and_restarts_become_tags():
    workers = [{"host": "a", "pid": 1}, {"host": "b", "pid": 1}]
    events = [
        {"kind": "training_started", "attempt": 1, "step": 0, "workers": workers, "plan": {"x": 1}},
        {"kind": "restarted", "attempt": 1, "step": 7, "cause": "rank 1 died"},
        {"kind": "training_started", "attempt": 2, "step": 5, "workers": workers[:1], "plan": {}},
    ]
    assert tags_of(events, Continuation(2, 0)) == {
        "attempts": "2",
        "restarts": "1",
        "attempt.1.from_step": "0",
        "attempt.1.workers": "2",
        "attempt.1.hosts": "a, b",
        "attempt.2.from_step": "5",
        "attempt.2.workers": "1",
        "attempt.2.hosts": "a",
        "restart.1.after_step": "7",
        "restart.1.cause": "rank 1 died",
        "continuation.equal_steps": "2",
        "continuation.different_steps": "0",
    }
    assert plans_of(events) == {"attempt-1": {"x": 1}}


def test_going_on_after_a_stop_that_was_asked_for_is_no_restart():
    def restarts(*events: str | dict[str, object]) -> int:
        return restarts_of([{"kind": e} if isinstance(e, str) else e for e in events])

    start, fail, stopped, trained = "training_started", "restarted", "stopped", "trained"
    asked = {"kind": "ended", "exit_code": 75, "is_asked": True}
    lost = {"kind": "ended", "exit_code": 75, "is_asked": False}
    assert restarts(start, stopped, asked, "launched", start, trained) == 0
    assert restarts(start, asked, "launched", start, trained) == 0, "no time for a checkpoint"
    assert restarts(start, stopped, start, trained) == 0, "there was room for more workers"
    assert restarts(start, fail, start, stopped, asked, "launched", start, trained) == 1
    assert restarts(start, fail, asked, "launched", start, trained) == 1, "asked between the two"
    assert restarts(start, lost, "launched", start, trained) == 1, "the cluster was gone"
    assert restarts(start, "launched", start, trained) == 1, "the driver was killed"


def test_going_on_because_a_job_shall_have_more_steps_is_no_restart():
    def restarts(*kinds: str) -> int:
        return restarts_of([{"kind": kind} for kind in kinds])

    start, fail, trained, end = "training_started", "restarted", "trained", "finished"
    assert restarts(start, trained, end) == 0
    assert restarts(start, trained, end, start, trained, end) == 0
    assert restarts(start, fail, start, trained, end) == 1
    assert restarts(start, "ended", "launched", start, trained, end) == 1
    assert restarts(start, trained, end, start, fail, start, trained, end) == 1
    assert restarts(start, trained, fail, start, trained, end) == 1, "it failed in its last moment"
    assert restarts(start, fail, fail, start, trained) == 1, "one attempt ended before it trained"


def test_after_a_roll_back_the_newest_point_of_a_step_is_the_one_that_counts(tmp_path):
    """Whether the tracker was told of the earlier one or not, and over restarts of both."""
    spool, tracker = MetricsSpool(tmp_path), Tracker()
    offsets = [0]
    delivery = MetricDelivery(spool, tracker, 0, offsets.append)
    for step in (1, 2, 3, 4):
        spool.append(step, {"train/loss": float(step)}, 0.0)
        if step == 3:
            delivery.deliver()
    spool.forget(2)
    spool.append(3, {"train/loss": 30.0}, 0.0)
    spool = MetricsSpool(tmp_path)  # another attempt, from a checkpoint of step 2
    assert spool.append(3, {"train/loss": 30.0}, 0.0).is_equal
    for step in (4, 5):
        assert spool.append(step, {"train/loss": 10.0 * step}, 0.0) is None
    MetricDelivery(spool, tracker, offsets[-1], offsets.append).deliver()
    newest = {step: value for _, step, value in tracker.points}
    assert newest == {1: 1.0, 2: 2.0, 3: 30.0, 4: 40.0, 5: 50.0}
    assert len(tracker.points) == 6
