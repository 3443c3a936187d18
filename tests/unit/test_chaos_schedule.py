"""What chaos does to a job: random, within its rules, and the same for the same seed."""

import pytest
from dmuon_platform.chaos_schedule import HARMLESS, KILL_DRIVER, ChaosSchedule
from dmuon_platform.errors import SpecError
from dmuon_platform.recoveries import recoveries
from dmuon_platform.recovery_bench import recovery_schedule
from dmuon_platform.spec import JobSpec, job_of
from small_job import small

ALL_KINDS = {str(kind) for kind in HARMLESS} | {KILL_DRIVER}


def job(**changes: object) -> JobSpec:
    return job_of(small(train__steps=60, resources__workers=2, **changes))


def kinds_of(schedule: ChaosSchedule) -> list[str]:
    return [str(f.kind) for f in schedule.inject] + [KILL_DRIVER] * len(schedule.driver_kills)


@pytest.mark.parametrize("seed", range(10))
def test_a_seed_and_a_round_say_what_happens_and_the_job_can_be_run(seed: int) -> None:
    schedule = ChaosSchedule.draw(job(), seed, 1, 6)
    assert schedule == ChaosSchedule.draw(job(), seed, 1, 6)
    assert schedule != ChaosSchedule.draw(job(), seed, 2, 6)
    assert schedule != ChaosSchedule.draw(job(), seed + 1, 1, 6)
    assert len(set(kinds_of(schedule))) == 6
    disturbed = schedule.disturbed(job(), "chaos")
    assert disturbed.faults.inject == schedule.inject
    assert [d.split(":")[0] for d in disturbed.differences_that_forbid_resume(job())] == ["name"]


def test_every_harmless_kind_comes_before_one_comes_twice() -> None:
    many = ChaosSchedule.draw(job(), 0, 1, len(ALL_KINDS))
    assert set(kinds_of(many)) == ALL_KINDS
    assert len(kinds_of(ChaosSchedule.draw(job(), 0, 1, 1000))) == 59
    on_a_cluster = job(resources__address="head:6379")
    kinds = kinds_of(ChaosSchedule.draw(on_a_cluster, 0, 1, 30))
    assert set(kinds) == ALL_KINDS - {"kill_controller"}


def test_a_recovery_is_split_by_what_the_journal_says() -> None:
    def event(kind: str, time: float, **facts: object) -> dict[str, object]:
        return {"kind": kind, "time": time, **facts}

    events = [
        event("training_started", 1.0, step=0, restore_s=0.0),
        event("fault_injected", 10.0, fault="slow", step=3, on="rank 0"),  # nothing ended by it
        event("fault_injected", 20.0, fault="kill", step=7, on="rank 0"),
        event("restarted", 22.0),
        event("training_started", 30.0, step=4, restore_s=2.0),
        event("fault_injected", 40.0, fault="kill_driver", step=9, on="the driver"),
        event("launched", 41.0),
        event("training_started", 50.0, step=8, restore_s=1.0),
        event("fault_injected", 60.0, fault="kill", step=11, on="rank 0"),  # at its end, say
    ]
    steps = [(6, 19.0), (5, 31.5), (8, 39.0), (9, 50.5)]
    kill, driver = recoveries(events, steps)
    assert (kill.fault, kill.detection_s, kill.restart_s, kill.restore_s) == ("kill", 2.0, 6.0, 2.0)
    assert (kill.first_step_s, kill.steps_again, kill.total_s) == (1.5, 2, 11.5)
    assert (driver.detection_s, driver.restart_s, driver.first_step_s) == (1.0, 8.0, 0.5)
    assert driver.steps_again == 0


def test_the_benchmark_lets_each_kind_strike_once_with_steps_between() -> None:
    schedule = recovery_schedule(job())
    struck = [(str(fault.kind), fault.step, fault.rank) for fault in schedule.inject]
    assert struck == [("kill", 12, 1), ("freeze", 24, 1), ("stall", 36, 1)]
    assert schedule.driver_kills == (48,)
    with pytest.raises(SpecError, match="4 are too few"):
        recovery_schedule(job_of(small(train__steps=4)))
    alone = recovery_schedule(job(), ["kill_controller"])
    assert [(str(fault.kind), fault.step) for fault in alone.inject] == [("kill_controller", 30)]
    assert alone.driver_kills == ()
