"""Metrics and events on disk: every step once, whatever is killed or full in between."""

import math
import os
import warnings
from contextlib import contextmanager

import pytest
from dmuon_platform.events import Journal
from dmuon_platform.spool import Continuation, MetricsSpool
from hypothesis import given
from hypothesis import strategies as st


def steps(run_dir):
    return [record.step for record in MetricsSpool(run_dir).read_from(0)[0]]


def test_what_is_appended_is_read_once(tmp_path):
    spool = MetricsSpool(tmp_path)
    spool.append(1, {"train/loss": 0.1 + 0.2}, 5.0)
    (record,), offset = MetricsSpool(tmp_path).read_from(0)
    assert (record.step, record.metrics, record.time) == (1, {"train/loss": 0.1 + 0.2}, 5.0)
    assert spool.read_from(offset) == ([], offset)
    spool.append(2, {"train/loss": 1.0}, 6.0)
    assert [each.step for each in spool.read_from(offset)[0]] == [2]


@given(cut=st.integers(0, 200))
def test_a_torn_last_line_is_repaired_and_nothing_else_is_lost(tmp_path_factory, cut):
    run_dir = tmp_path_factory.mktemp("run")
    spool = MetricsSpool(run_dir)
    for step in (1, 2, 3):
        spool.append(step, {"train/loss": 1 / step}, 0.0)
    path = run_dir / "metrics.jsonl"
    os.truncate(path, max(0, path.stat().st_size - cut))
    whole = steps(run_dir)
    assert whole == [1, 2, 3][: len(whole)]
    restarted = MetricsSpool(run_dir)
    for step in (1, 2, 3, 4):
        replay = restarted.append(step, {"train/loss": 1 / step}, 0.0)
        assert (replay is not None) == (step in whole)
    assert steps(run_dir) == [1, 2, 3, 4]


def test_replayed_steps_are_compared_bit_for_bit_and_not_doubled(tmp_path):
    first = MetricsSpool(tmp_path)
    first.append(1, {"train/loss": 0.3, "speed/tokens_per_s": 10.0, "time/data_s": 1.0}, 0.0)
    first.append(2, {"train/loss": math.nan}, 0.0)
    first.append(3, {"train/loss": 0.0}, 0.0)
    again = MetricsSpool(tmp_path)
    one = again.append(1, {"train/loss": 0.1 + 0.2, "speed/tokens_per_s": 9.0}, 1.0)
    two = again.append(2, {"train/loss": math.nan}, 1.0)
    three = again.append(3, {"train/loss": -0.0}, 1.0)
    assert one is not None
    assert one.differences == {"train/loss": (0.3, 0.1 + 0.2)}
    assert two is not None
    assert two.is_equal
    assert three is not None
    assert not three.is_equal
    assert steps(tmp_path) == [1, 2, 3]
    assert MetricsSpool(tmp_path).continuation() == Continuation(equal=1, different=2)


def test_a_third_attempt_is_compared_with_the_first(tmp_path):
    for loss in (0.5, 0.25, 0.5):
        replay = MetricsSpool(tmp_path).append(1, {"train/loss": loss}, 0.0)
    assert replay is not None
    assert replay.is_equal


def test_metrics_that_a_replayed_step_did_not_have_are_added(tmp_path):
    MetricsSpool(tmp_path).append(1, {"train/loss": 0.5}, 0.0)
    MetricsSpool(tmp_path).append(1, {"train/loss": 0.5, "evaluation/loss": 0.7}, 1.0)
    records, _ = MetricsSpool(tmp_path).read_from(0)
    assert [each.metrics for each in records] == [{"train/loss": 0.5}, {"evaluation/loss": 0.7}]


@pytest.fixture
def full_disk(monkeypatch):
    """A context in which a disk takes 10 bytes more and is full then."""
    write = os.write

    @contextmanager
    def full():
        room = 10

        def write_as_far_as_it_goes(file: int, data: bytes) -> int:
            nonlocal room
            if room == 0:
                raise OSError(28, "No space left on device")
            taken = write(file, data[:room])
            room -= taken
            return taken

        with monkeypatch.context() as patch:
            patch.setattr("dmuon_platform.line_file.os.write", write_as_far_as_it_goes)
            yield

    return full


def test_a_full_disk_does_not_stop_the_training_and_loses_no_line(tmp_path, full_disk):
    spool = MetricsSpool(tmp_path)
    spool.append(1, {"train/loss": 1.0}, 0.0)
    with full_disk():
        for step in (2, 3):
            with pytest.warns(UserWarning, match="No space"):
                spool.append(step, {"train/loss": 1.0}, 0.0)
        with pytest.raises(OSError, match="No space"):
            spool.sync()
    assert steps(tmp_path) == [1]
    spool.append(4, {"train/loss": 1.0}, 0.0)
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_what_could_not_be_noted_on_a_full_disk_is_in_the_journal_later_in_order(
    tmp_path, full_disk
):
    journal = Journal(tmp_path)
    with full_disk():
        with pytest.warns(UserWarning, match="checkpoint_failed"):
            journal.note("checkpoint_failed", step=10)
        with pytest.raises(OSError, match="No space"):
            journal.append("trained", step=20)
    assert journal.read() == []
    journal.note("checkpoint_saved", step=30)
    assert [event["step"] for event in journal.read()] == [10, 20, 30]
    assert [event["time"] for event in journal.read()] == sorted(e["time"] for e in journal.read())


def test_a_damaged_line_is_named_and_the_others_are_read(tmp_path):
    spool = MetricsSpool(tmp_path)
    spool.append(1, {"train/loss": 1.0}, 0.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("\x00\x00\n")
    spool.append(2, {"train/loss": 1.0}, 0.0)
    with pytest.warns(UserWarning, match="damaged"):
        assert steps(tmp_path) == [1, 2]


def test_the_journal_keeps_order_and_survives_a_torn_line(tmp_path):
    journal = Journal(tmp_path)
    assert journal.read() == []
    assert journal.last("started") is None
    journal.append("started", attempt=1)
    journal.append("saved", step=10)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"kind": "sta')
    journal.append("started", attempt=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [event["kind"] for event in journal.read()] == ["started", "saved", "started"]
        last = journal.last("started")
    assert last is not None
    assert last["attempt"] == 2
