"""What is tried again, what is not, and what the last message says first."""

import errno

import pytest
from dmuon_platform.causes import Cause, cause_of
from dmuon_platform.errors import Diverged, FatalError, PlatformError
from dmuon_platform.events import Journal
from dmuon_platform.spec.faults import FaultsSpec
from dmuon_platform.supervisor import Planned, Supervisor, unfinished_failures


class WorkerGroupError(Exception):
    """As Ray raises it: what each rank that failed had to say."""

    def __init__(self, **failures):
        super().__init__("all the traces")
        self.worker_failures = {int(rank[1:]): error for rank, error in failures.items()}


class RayActorError(Exception):
    pass


class WorkerHealthCheckTimeoutError(Exception):
    pass


DEATH = Cause("rank 1 died", "", is_loss=True)
BUG = Cause("ValueError: shapes", "the trace")


def _supervise(outcomes, steps=((0, 0),), earlier=(), **budgets):
    """Run through ``outcomes`` at ``steps`` (done, saved); return result, failures, pauses."""
    numbered = iter(enumerate(outcomes, start=1))
    steps = iter([*steps, *[steps[-1]] * len(outcomes)])
    noted, pauses = [], []
    supervisor = Supervisor(FaultsSpec(**budgets), earlier)
    result = supervisor.run(
        lambda: next(numbered), lambda: next(steps), noted.append, pauses.append
    )
    return result, noted, pauses


def test_a_failure_is_answered_by_another_attempt():
    result, noted, _ = _supervise([DEATH, {"step": 9}], steps=[(4, 2)])
    assert result == {"step": 9}
    assert [(each.attempt, each.step, each.saved) for each in noted] == [(1, 4, 2)]


def test_a_final_error_ends_the_run_as_it_is():
    with pytest.raises(Diverged, match="loss nan"):
        _supervise([Cause("", "", final=Diverged("loss nan"))])


def test_the_same_error_twice_at_the_same_step_is_fatal():
    with pytest.raises(FatalError, match=r"^ValueError: shapes") as caught:
        _supervise([BUG, DEATH, BUG], steps=[(7, 5), (6, 5), (7, 5)])
    assert caught.value.exit_code == 70


def test_the_same_error_further_on_is_tried_again():
    result, _, _ = _supervise([BUG, BUG, "done"], steps=[(7, 5), (8, 5)])
    assert result == "done"


def test_each_sort_of_failure_has_its_own_budget_and_the_first_cause_is_on_top():
    outcomes = [DEATH, BUG, DEATH, DEATH]
    steps = [(1, 0), (2, 0), (3, 0), (3, 0)]
    result, _, _ = _supervise([*outcomes, "done"], steps, max_losses=3, max_failures=1)
    assert result == "done"
    with pytest.raises(PlatformError, match=r"faults.max_losses = 2") as caught:
        _supervise(outcomes, steps, max_losses=2, max_failures=1)
    assert str(caught.value).startswith("rank 1 died")
    assert "attempt 2, after step 2: ValueError: shapes" in str(caught.value)
    assert caught.value.exit_code == 1


def test_a_new_checkpoint_fills_the_budgets_again():
    steps = [(10 * n, 10 * n) for n in range(1, 8)]
    result, _, pauses = _supervise([DEATH] * 7 + ["done"], steps, max_losses=1)
    assert result == "done"
    assert pauses == [0.0] * 7


def test_without_progress_there_is_more_and_more_time_between_attempts():
    _, _, pauses = _supervise([DEATH] * 9 + ["done"], max_losses=9)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_going_on_with_other_workers_is_no_failure():
    result, noted, _ = _supervise([Planned("more workers")] * 9 + ["done"], max_losses=0)
    assert (result, noted) == ("done", [])


def test_a_driver_goes_on_with_the_budgets_of_one_that_was_killed():
    restarted = {"kind": "restarted", "attempt": 3, "step": 7, "saved": 5}
    restarted |= {"is_loss": False, "cause": BUG.summary, "details": BUG.details}
    events = [{"kind": "launched"}, restarted]
    earlier = unfinished_failures(events)
    with pytest.raises(FatalError):
        _supervise([BUG], steps=[(7, 5)], earlier=earlier)
    assert unfinished_failures([*events, {"kind": "ended"}]) == []
    assert unfinished_failures([*events, {"kind": "launched"}]) == []


def test_a_journal_that_is_damaged_does_not_keep_a_run_from_going_on(tmp_path):
    journal = Journal(tmp_path)
    journal.append("launched")
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{}\n{"kind": ["a"]}\n\0\0\n' + b"[" * 100_000 + b"\n")
        file.write(b'{"kind": "restarted", "is_loss": true, "step": "one"}\n{"kind": "resta')
    with pytest.warns(UserWarning, match="damaged and skipped"):
        events = journal.read()
    assert [event["kind"] for event in events] == ["launched", "restarted"]
    assert unfinished_failures(events) == []


def test_a_dead_rank_is_blamed_before_those_that_miss_it():
    lost = RuntimeError("gloo: Connection closed by peer")
    cause = cause_of(WorkerGroupError(_0=lost, _1=RayActorError("gone")))
    assert "rank 1 died" in cause.summary
    assert cause.is_loss
    assert not cause.is_hang


DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: RayTrainWorker
\tactor_id: ebb51436040e05dfee70fa0901000000
\tpid: 4370
\tnamespace: f8bae38d-dec2-4c43-ba0a-7de645dbd296
\tip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker unexpectedly exits with a connection error code 2. End of file."""
GUESSES = """ Some common causes include: (1) the process was killed by the OOM killer due to high \
memory usage, (2) ray stop --force was called, or (3) the worker crashed unexpectedly due to \
SIGSEGV or another unexpected error. If the process was killed by the kernel OOM killer, consider \
enabling resource isolation via --enable-resource-isolation."""
SHORT = "Task was killed due to the node running low on memory.\nMemory was 15 GB / 16 GB (0.95)."


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_death_is_told_with_its_place_and_without_what_may_have_caused_any(wrapped):
    death = RayActorError(DIED + GUESSES)
    if wrapped:
        death.health_check_failure = RayActorError(DIED + GUESSES)
    cause = cause_of(WorkerGroupError(_1=death))
    assert cause.summary == (
        "The worker process of rank 1 died (process 4370 on 192.0.2.2): killed, out of memory, or "
        "its machine."
    )
    first, _, last = DIED.partition("\n\tclass_name")
    place, said = "\tpid: 4370\n\tip: 192.0.2.2", last.rpartition("\n")[2]
    assert cause.details == f"{first}\n{place}\n{said}"
    assert cause_of(RayActorError(DIED + GUESSES)).details == cause.details


def test_memory_that_was_short_is_told():
    cause = cause_of(WorkerGroupError(_1=RayActorError(SHORT)))
    assert cause.summary.endswith("died: killed by Ray, since its machine was short of memory.")
    assert cause.details == SHORT


def test_an_error_in_the_code_is_blamed_before_its_consequences():
    lost = RuntimeError("gloo: Connection closed by peer")
    cause = cause_of(WorkerGroupError(_0=lost, _1=ValueError("bad shape\nmore")))
    assert cause.summary == "Rank 1: ValueError: bad shape"
    assert cause.details == "all the traces"
    assert not cause.is_loss


def test_divergence_is_final_whichever_rank_says_so():
    cause = cause_of(WorkerGroupError(_0=Diverged("loss inf"), _1=RayActorError("gone")))
    assert isinstance(cause.final, Diverged)


@pytest.mark.parametrize(
    ("error", "is_hang"),
    [
        (OSError(errno.EIO, "Input/output error"), False),
        (RuntimeError("gloo: Connection reset by peer"), False),
        (RuntimeError("Timed out waiting 8000ms for recv operation to complete"), True),
        (WorkerHealthCheckTimeoutError("no answer"), True),
    ],
)
def test_what_storage_and_network_do_is_a_loss(error, is_hang):
    cause = cause_of(WorkerGroupError(_0=error))
    assert cause.is_loss
    assert cause.is_hang == is_hang
    assert cause.final is None


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.ENOSPC])
def test_storage_that_fails_in_the_process_that_steers_is_a_loss_too(number):
    # Twice at the same step it would else count as a bug.
    assert cause_of(OSError(number, "the snapshot cannot be written")).is_loss


def test_a_missing_file_is_an_error_of_the_code():
    assert not cause_of(WorkerGroupError(_0=FileNotFoundError(errno.ENOENT, "no"))).is_loss


def test_a_controller_that_dies_is_a_loss():
    cause = cause_of(RayActorError("The actor died unexpectedly"))
    assert "controller" in cause.summary
    assert cause.is_loss
