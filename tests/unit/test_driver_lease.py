"""One driver a run: who is refused, who takes over, and whom a request to stop is meant for."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from dmuon_platform import driver_lease
from dmuon_platform.driver_lease import Driver, DriverLease
from dmuon_platform.durable_file import write_whole
from dmuon_platform.errors import AlreadyRunning
from dmuon_platform.heartbeat import Heartbeat, Heartbeats, Phase
from dmuon_platform.stop_request import After, StopFile, StopRequest

HOLDER = """
import sys, time
from pathlib import Path
from dmuon_platform.driver_lease import DriverLease
with DriverLease(Path(sys.argv[1]), ray_job="job-1"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process on this machine that has the lease of ``tmp_path``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def _write(run_dir: Path, driver: Driver) -> None:

    write_whole(run_dir / "driver.json", json.dumps(asdict(driver)))


def test_the_second_driver_is_refused_while_the_first_lives(other, tmp_path):
    with pytest.raises(AlreadyRunning) as caught, DriverLease(tmp_path):
        pass
    message = str(caught.value)
    assert f"process {other.pid} on " in message
    assert "started 20" in message
    assert f"`dmuon stop {tmp_path.name} --storage={tmp_path.parent}`" in message
    driver = Driver.read(tmp_path)
    assert driver.is_alive(tmp_path)
    assert (driver.pid, driver.ray_job) == (other.pid, "job-1")


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_the_next_driver_goes_on_at_once(other, tmp_path, how):
    if how == "killed":
        other.send_signal(signal.SIGKILL)
    other.communicate()
    assert not Driver.read(tmp_path).is_alive(tmp_path)
    with DriverLease(tmp_path) as lease:
        assert Driver.read(tmp_path).launch == lease.launch
        assert Driver.read(tmp_path).is_alive(tmp_path)
    assert Driver.read(tmp_path).ended is not None
    assert not Driver.read(tmp_path).is_alive(tmp_path)


def test_without_shared_locks_a_driver_elsewhere_is_told_by_its_heartbeat(tmp_path, monkeypatch):
    monkeypatch.setattr(driver_lease, "SILENT_S", 1.0)
    long_ago = Driver("theirs", "elsewhere", 7, started=1.0, time=2.0)  # its clock is wrong, too
    _write(tmp_path, long_ago)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.1):
            _write(tmp_path, replace(long_ago, time=time.monotonic()))

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(AlreadyRunning, match="process 7 on elsewhere"), DriverLease(tmp_path):
            pass
    finally:
        stop.set()
        beating.join()
    with DriverLease(tmp_path) as lease:
        assert Driver.read(tmp_path).launch == lease.launch


def test_a_request_to_stop_is_meant_for_one_launch(tmp_path):
    file = StopFile(tmp_path)
    file.write(StopRequest.now("first", "SIGTERM"))
    assert file.read("second") is None
    assert file.read("first").reason == "SIGTERM"
    assert file.remove()
    assert not file.remove()


def test_a_request_to_end_is_stronger_than_one_to_restart(tmp_path):
    file = StopFile(tmp_path)
    file.write(StopRequest.now("one", "more workers", After.RESTART))
    file.write(StopRequest.now("one", "SIGTERM", After.END))
    file.write(StopRequest.now("one", "more workers", After.RESTART))
    assert file.read("one").after == After.END


@pytest.mark.parametrize("text", ["", "{", "[]", '{"launch": "one"}', '{"launch": "one", "after"'])
def test_half_a_request_is_none(tmp_path, text):
    (tmp_path / "stop.json").write_text(text)
    assert StopFile(tmp_path).read("one") is None


def test_heartbeats_are_those_of_the_newest_attempt(tmp_path):
    beats = Heartbeats(tmp_path)
    assert beats.read() == []
    first = [Heartbeat(1, rank, "host", 10 + rank, 5, Phase.DATA, 9, 1.0, 2.0) for rank in range(3)]
    second = [replace(first[0], attempt=2), replace(first[1], attempt=2, phase=Phase.SAVE)]
    for beat in (*first, *second):
        beats.write(beat)
    (beats.folder / "attempt-3-rank-00009.json").write_text('{"attempt": 3')
    assert beats.read() == second
    assert beats.read(1) == first
    beats.clear()
    assert beats.read() == []


def test_the_controller_gives_a_sign_before_any_rank_has_made_the_folder(tmp_path):
    beats = Heartbeats(tmp_path)
    beats.beat_for_controller(1, every_s=3600.0)
    deadline = time.monotonic() + 60
    while beats.signs(1)[1] == 0:  # else nobody would miss one that is frozen early
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_disk_without_room_does_not_look_like_the_end_of_a_rank(tmp_path):
    beats = Heartbeats(tmp_path)
    beat = Heartbeat(2, 0, "host", 10, 5, Phase.DATA, 9, 1.0, 2.0)
    beats.write(beat)
    (file,) = beats.folder.iterdir()
    os.utime(file, ns=(1, 1))
    assert beats.signs(2) == (1, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            beats.write(beat)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert beats.signs(2)[0] > 1
    assert beats.signs(1) == (0, 0), "ranks of an earlier attempt do not speak for this one"
