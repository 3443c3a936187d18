"""Which batch a step takes when some are left out, and what becomes of a step's update."""

import random

import pytest
from dmuon_platform.batch_order import BatchOrder
from dmuon_platform.errors import Diverged
from dmuon_platform.spec.faults import FaultsSpec, LossSpike
from dmuon_platform.spool import MetricsSpool
from dmuon_platform.stability import Stability, Verdict

NAN = float("nan")


@pytest.mark.parametrize("seed", range(20))
def test_steps_take_each_batch_once_in_order_but_those_left_out(seed: int) -> None:
    draw = random.Random(seed)
    windows = [(first := draw.randrange(60), first + draw.randrange(6)) for _ in range(7)]
    left_out = {batch for first, last in windows for batch in range(first, last + 1)}
    order = BatchOrder(windows)
    assert [order.batch_of(step) for step in range(50)] == [
        batch for batch in range(200) if batch not in left_out
    ][:50]


def test_roll_backs_change_nothing_before_their_checkpoint_and_never_meet_a_batch_again() -> None:
    """Also a second one that goes back behind the first."""
    first = BatchOrder().without(20, 25)
    second = first.without(first.batch_of(10), first.batch_of(30))
    assert [second.batch_of(step) for step in range(10)] == [*range(10)]
    assert second.batch_of(10) == first.batch_of(30) + 1


def test_what_follows_a_step_that_is_not_finite_is_the_jobs_choice() -> None:
    for loss, norm in [(NAN, 1.0), (1.0, float("inf"))]:
        with pytest.raises(Diverged, match="Step 4 diverged: loss"):
            Stability(FaultsSpec()).judge(3, loss, norm)
        assert Stability(FaultsSpec(non_finite="skip")).judge(3, loss, norm) is Verdict.DROP
        roll_back = Stability(FaultsSpec(non_finite="roll_back"))
        assert roll_back.judge(3, loss, norm) is Verdict.ROLL_BACK


def test_dropped_steps_count_in_a_row_and_over_a_restart() -> None:
    faults = FaultsSpec(non_finite="skip", max_skips=2)
    stability = Stability(faults, num_dropped=1)
    assert stability.judge(5, NAN, 1.0) is Verdict.DROP
    with pytest.raises(Diverged, match="as 2 before it"):
        stability.judge(6, NAN, 1.0)
    stability = Stability(faults, num_dropped=2)
    assert stability.judge(5, 1.0, 1.0) is Verdict.APPLY
    assert stability.judge(6, NAN, 1.0) is Verdict.DROP


def test_a_spike_is_measured_by_the_median_of_the_applied_steps_before_it() -> None:
    spike = LossSpike(factor=2.0, window=3)
    faults = FaultsSpec(loss_spike=spike, non_finite="skip")
    stability = Stability(faults)
    verdicts = [stability.judge(i, loss, 1.0) for i, loss in enumerate([9.0, 1.0, 1.0, NAN])]
    assert verdicts == [Verdict.APPLY] * 3 + [Verdict.DROP]  # too few before 9.0 to say so
    assert stability.judge(4, 1.9, 1.0) is Verdict.APPLY
    assert stability.judge(5, 2.1, 1.0) is Verdict.ROLL_BACK
    assert Stability(faults, [1.0, 1.0, 1.9]).judge(5, 2.1, 1.0) is Verdict.ROLL_BACK
    assert Stability(FaultsSpec()).judge(5, 1e30, 1.0) is Verdict.APPLY


def test_steps_after_a_roll_back_are_written_again_and_compared_with_the_newest(tmp_path) -> None:
    spool = MetricsSpool(tmp_path)
    for step in (1, 2, 3, 4):
        spool.append(step, {"train/loss": float(step)}, 0.0)
    spool.forget(2)
    assert spool.append(3, {"train/loss": 30.0}, 0.0) is None
    reopened = MetricsSpool(tmp_path)
    assert reopened.append(3, {"train/loss": 30.0}, 0.0).is_equal
    assert reopened.append(4, {"train/loss": 40.0}, 0.0) is None  # its first time since
    newest = [(r.step, r.metrics["train/loss"]) for r in reopened.newest_first(4)]
    assert newest == [(4, 40.0), (3, 30.0), (2, 2.0), (1, 1.0)]
    assert len(reopened.read_from(0)[0]) == 6
