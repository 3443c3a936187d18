"""``driver.json`` and ``driver.lock``: which launch of a run is alive. There is one at a time.

The lock is an ``flock``, which the kernel drops when the process dies, however it dies. Where locks
do not reach from one machine to another, the heartbeat in ``driver.json`` does: a launch on another
machine counts as alive while that changes. No clocks of two machines are compared for it.
"""

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Self

from dmuon_platform.durable_file import read_object, write_whole
from dmuon_platform.errors import AlreadyRunning
from dmuon_platform.event_facts import clock
from dmuon_platform.run_folder import words_for

DRIVER_FILE = "driver.json"
LOCK_FILE = "driver.lock"

BEAT_S = 5.0
"""Seconds between two heartbeats."""

SILENT_S = 20.0
"""A driver on another machine that has not beaten for so long is dead."""

LOCK_TRIES_S = 2.0
"""`Driver.is_alive` holds the lock for a moment, so a launch tries for longer than that."""


@dataclass(frozen=True)
class Driver:
    """The launch that has a run, or had it last.

    Attributes:
        launch: Different for every launch.
        host: Its machine.
        pid: Of the command's process there.
        started: Unix time.
        time: Unix time of the last heartbeat.
        ray_address: Of the cluster that it uses: ``host:port``; None for one of its own.
        ray_job: Its submission id inside ``ray job submit``; None elsewhere.
        job_server: Which took that submission, if it was ``dmuon submit`` or ``resume``.
        ended: Unix time at which it ended; None while it runs, and for ever when it was killed.
    """

    launch: str
    host: str
    pid: int
    started: float
    time: float
    ray_address: str | None = None
    ray_job: str | None = None
    job_server: str | None = None
    ended: float | None = None

    @classmethod
    def read(cls, run_dir: Path) -> "Driver | None":
        """Return who has the run, or had it last; None if nobody ever had."""
        content = read_object(run_dir / DRIVER_FILE)
        known = {field.name for field in fields(cls)}
        try:
            return (
                None if content is None else cls(**{k: content[k] for k in content.keys() & known})
            )
        except TypeError:
            return None

    def is_alive(self, run_dir: Path) -> bool:
        """Tell whether it still runs, as well as it can be told without waiting.

        On another machine without shared locks this compares its last heartbeat with our clock.
        """
        if self.ended is not None:
            return False
        if _is_locked(run_dir):
            return True
        return self.host != socket.gethostname() and time.time() - self.time < SILENT_S

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {clock(self.started)}"


class DriverLease:
    """Held by the one driver of a run, as a context manager; beats in the background.

    Args:
        run_dir: The folder of the run, which exists.
        ray_address: As in `Driver`.
        ray_job: As in `Driver`.
        job_server: As in `Driver`.

    Raises:
        AlreadyRunning: Another launch has it, when the context is entered.
    """

    def __init__(
        self,
        run_dir: Path,
        ray_address: str | None = None,
        ray_job: str | None = None,
        job_server: str | None = None,
    ) -> None:
        self._run_dir = run_dir
        now = time.time()
        self._driver = Driver(
            launch=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=now,
            time=now,
            ray_address=ray_address,
            ray_job=ray_job,
            job_server=job_server,
        )
        self._handle: int | None = None
        self._is_over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="driver-heartbeat", daemon=True)

    @property
    def launch(self) -> str:
        """What requests to stop must name to be meant for this launch."""
        return self._driver.launch

    def __enter__(self) -> Self:
        self._handle = _locked(self._run_dir)
        if self._handle is None:
            raise _already_running(self._run_dir, Driver.read(self._run_dir))
        try:
            self._wait_for_silence()
            self._write()
        except BaseException:
            os.close(self._handle)
            raise
        self._beating.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._beating.join()
        self._driver = replace(self._driver, ended=time.time())
        with suppress(OSError):  # then the lock alone tells that it is over
            self._write()
        if self._handle is not None:
            os.close(self._handle)

    def _wait_for_silence(self) -> None:
        """Make sure that a driver on another machine is dead, whose lock we might not see."""
        earlier = Driver.read(self._run_dir)
        is_over = earlier is None or earlier.ended is not None
        if earlier is None or is_over or earlier.host == self._driver.host:
            return
        deadline = time.monotonic() + SILENT_S
        while time.monotonic() < deadline:
            time.sleep(min(1.0, SILENT_S / 4))
            now = Driver.read(self._run_dir)
            if now is not None and now.ended is not None:
                return
            if now is not None and now.time != earlier.time:
                raise _already_running(self._run_dir, now)

    def _beat(self) -> None:
        while not self._is_over.wait(BEAT_S):
            self._driver = replace(self._driver, time=time.time())
            with suppress(OSError):  # a full disk; the lock still holds
                self._write()

    def _write(self) -> None:
        content = json.dumps(asdict(self._driver), indent=2) + "\n"
        write_whole(self._run_dir / DRIVER_FILE, content)


def refuse_while_running(run_dir: Path) -> None:
    """Say that a run is being run, if that shows in its folder.

    Raises:
        AlreadyRunning: It is.
    """
    driver = Driver.read(run_dir)
    if driver is not None and driver.is_alive(run_dir):
        raise _already_running(run_dir, driver)


def refuse_while_locked(run_dir: Path) -> None:
    """Say that a run is being run, before a launch of it loads and prepares anything.

    The lock alone is asked, which needs no clock: whether a driver lives on a machine whose locks
    do not show here, a `DriverLease` finds out.

    Raises:
        AlreadyRunning: It is.
    """
    if _is_locked(run_dir):
        raise _already_running(run_dir, Driver.read(run_dir))


def _already_running(run_dir: Path, driver: Driver | None) -> AlreadyRunning:
    who = "another process" if driver is None else str(driver)
    return AlreadyRunning(
        f"{run_dir.name} is already being run by {who}. Two at a time would write over each other: "
        f"wait for it, or end it with a checkpoint by `dmuon stop {words_for(run_dir)}` or SIGTERM."
        f" If that process is surely dead, remove {run_dir / LOCK_FILE} and launch again."
    )


def _locked(run_dir: Path) -> int | None:
    """Return a handle that holds the lock until it is closed; None if somebody else holds it."""
    deadline = time.monotonic() + LOCK_TRIES_S
    handle = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(handle)
                return None
            time.sleep(0.1)
        else:
            return handle


def _is_locked(run_dir: Path) -> bool:
    try:
        handle = os.open(run_dir / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
