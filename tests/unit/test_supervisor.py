"""What is tried again, what is not, and what the last message says first."""

import pytest
from dmuon_platform.errors import Diverged, FatalError, PlatformError
from dmuon_platform.supervisor import Cause, cause_of, supervise


class WorkerGroupError(Exception):
    """As Ray raises it: what each rank that failed had to say."""

    def __init__(self, **failures):
        super().__init__("all the traces")
        self.worker_failures = {int(rank[1:]): error for rank, error in failures.items()}


class RayActorError(Exception):
    pass


DEATH = Cause("rank 1 died", "", died=True)
BUG = Cause("ValueError: shapes", "the trace")


def _supervise(outcomes, steps=(0,), max_failures=3):
    """Run through ``outcomes`` at ``steps``; return the result and the failures noted."""
    numbered = iter(enumerate(outcomes, start=1))
    steps = iter([*steps, *[steps[-1]] * len(outcomes)])
    noted = []
    result = supervise(lambda: next(numbered), lambda: next(steps), max_failures, noted.append)
    return result, noted


def test_a_failure_is_answered_by_another_attempt():
    result, noted = _supervise([DEATH, {"step": 9}], steps=[4])
    assert result == {"step": 9}
    assert [(failure.attempt, failure.step) for failure in noted] == [(1, 4)]


def test_a_final_error_ends_the_run_as_it_is():
    with pytest.raises(Diverged, match="loss nan"):
        _supervise([Cause("", "", final=Diverged("loss nan"))])


def test_the_same_error_twice_at_the_same_step_is_fatal():
    with pytest.raises(FatalError, match=r"^ValueError: shapes") as caught:
        _supervise([BUG, BUG], steps=[7, 7])
    assert caught.value.exit_code == 70


def test_the_same_error_further_on_is_tried_again():
    result, _ = _supervise([BUG, BUG, "done"], steps=[7, 8])
    assert result == "done"


def test_a_worker_that_dies_twice_at_the_same_step_is_tried_again():
    result, _ = _supervise([DEATH, DEATH, "done"], steps=[7, 7])
    assert result == "done"


def test_when_the_budget_is_gone_the_first_cause_is_on_top():
    with pytest.raises(PlatformError, match="gave up") as caught:
        _supervise([BUG, DEATH], steps=[1, 2], max_failures=1)
    assert str(caught.value).startswith("ValueError: shapes")
    assert caught.value.exit_code == 1


def test_a_dead_rank_is_blamed_before_those_that_miss_it():
    lost = RuntimeError("gloo: Connection closed by peer")
    cause = cause_of(WorkerGroupError(_0=lost, _1=RayActorError("gone")))
    assert "rank 1 died" in cause.summary
    assert cause.died


def test_an_error_in_the_code_is_blamed_before_its_consequences():
    lost = RuntimeError("gloo: Connection closed by peer")
    cause = cause_of(WorkerGroupError(_0=lost, _1=ValueError("bad shape\nmore")))
    assert cause.summary == "Rank 1: ValueError: bad shape"
    assert cause.details == "all the traces"


def test_divergence_is_final_whichever_rank_says_so():
    cause = cause_of(WorkerGroupError(_0=Diverged("loss inf"), _1=RayActorError("gone")))
    assert isinstance(cause.final, Diverged)
