"""A Ray of the job's own that does not start at the first try, as on a busy machine."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from dmuon_platform.errors import PlatformError
from dmuon_platform.ray_session import OWN_TRIES, RaySession
from dmuon_platform.spec import job_of
from small_job import small

pytestmark = pytest.mark.cluster


@contextmanager
def killed(times: int) -> Iterator[list[int]]:
    """Kill the first processes that start Ray for us; yields the list of those killed."""
    gone: list[int] = []
    is_over = threading.Event()

    def watch() -> None:
        while len(gone) < times and not is_over.wait(0.05):
            for child in psutil.Process().children():
                if child.pid not in gone and "dmuon_platform.ray_process" in child.cmdline():
                    child.kill()
                    gone.append(child.pid)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield gone
    finally:
        is_over.set()
        watching.join()


@pytest.fixture
def no_address(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_a_second_try_is_made_also_when_the_working_folder_is_gone(
    no_address, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    session = RaySession(job_of(small()))
    tmp_path.rmdir()
    with killed(1) as gone, session:
        assert session.room()[0].all_cpus >= 2
    assert len(gone) == 1


def test_what_never_starts_is_given_up_with_a_way_out(no_address):
    with killed(OWN_TRIES + 1) as gone, pytest.raises(PlatformError, match=r"resources\.address"):
        RaySession(job_of(small())).__enter__()
    assert len(gone) == OWN_TRIES
    assert not any(map(psutil.pid_exists, gone))


def test_who_presses_ctrl_c_twice_does_not_wait_for_a_ray_of_the_job(no_address):
    session = RaySession(job_of(small()))
    twice = pytest.raises(KeyboardInterrupt)
    with twice, session:
        process = session._process
        family = psutil.Process(process.pid).children(recursive=True)
        raise KeyboardInterrupt
    assert process.returncode == -signal.SIGKILL
    assert family
    assert not any(each.is_running() for each in family)
