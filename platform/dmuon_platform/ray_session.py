"""The driver's side of `ray_process`: asks it, and starts another when it is gone."""

import math
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import psutil

from dmuon_platform import cluster
from dmuon_platform.child_process import command_of, environment
from dmuon_platform.data import DatasetInfo
from dmuon_platform.elastic import NodeRoom
from dmuon_platform.errors import ClusterLost, PlatformError
from dmuon_platform.spec import JobSpec

CONNECT_S = 180.0
"""How long starting or joining Ray may take."""

ANSWER_S = 60.0
"""How long a question about the cluster may take; Ray gives a lost head up after as long."""

CLOSE_S = 20.0
"""How long leaving the cluster may take."""

OWN_TRIES = 3
"""How often a Ray of our own is started before the job gives up."""

PROBE_S = 3.0
"""Seconds between two looks whether the head of a Ray of our own still lives."""


class RayLost(ClusterLost):
    """The process that is connected to Ray is gone, or answers no more."""


class RaySession:
    """One connection to Ray after another, as a context manager.

    Relative paths of text are looked up from the folder that is current when this is made, whatever
    becomes of it then.

    Args:
        spec: The job; it says which cluster.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._folder = Path.cwd()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._scratch: Path | None = None
        self._head: tuple[str, int] | None = None
        self._probed = 0.0
        self._has_asked = False

    def __enter__(self) -> Self:
        self._connect_first()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Who presses Ctrl-C twice does not want to wait; a joined cluster is left in order.
        is_own = cluster.address_of(self._spec) is None
        self.close(at_once=is_own and kind is KeyboardInterrupt)

    def _connect_first(self) -> None:
        """Connect; a Ray of our own gets more than one try, since its ports are a matter of luck.

        Raises:
            PlatformError: The cluster is not there, or does not accept us, or ours did not start.
        """
        if cluster.address_of(self._spec) is not None:
            return self.connect()
        for _ in range(OWN_TRIES):
            try:
                return self.connect()
            except (RayLost, RuntimeError) as error:
                problem = error
        reason = str(problem).strip().splitlines()[-1]
        raise PlatformError(
            f"The local Ray of this job did not start in {OWN_TRIES} tries: {reason}\nLook for a "
            "machine that is out of memory or very busy (`uptime`, `free -m`, `dmuon doctor`), or "
            "start a Ray yourself with `ray start --head` and name it in resources.address."
        ) from problem

    @property
    def is_connected(self) -> bool:
        """Whether there is a process that is connected, as far as is known."""
        return self._process is not None

    def connect(self) -> None:
        """Join the cluster of the job, or start one of its own.

        Raises:
            PlatformError: The cluster is not there, or does not accept us.
        """
        cluster.check_address(self._spec)
        self._has_asked = False
        try:
            self._start()
            address = self._ask("connect", CONNECT_S, spec=self._spec.model_dump(mode="json"))
        except BaseException:
            self.close()
            raise
        host, _, port = address.rpartition(":")
        is_own = cluster.address_of(self._spec) is None
        self._head = (host, int(port)) if is_own and port.isdigit() else None

    def prepare(self, folder: Path) -> DatasetInfo:
        """Return the job's dataset below ``folder``, prepared there if it is not yet."""
        return self._ask("prepare", None, folder=folder, here=self._folder)

    def room(self) -> list[NodeRoom]:
        """Return what is free in the cluster."""
        return self._ask("room", ANSWER_S)

    def ask_for_room(self) -> None:
        """Ask the autoscaler of a joined cluster, if it has one, for room for all workers.

        Once a connection is enough: Ray remembers it until we leave.
        """
        if self._has_asked or cluster.address_of(self._spec) is None:
            return
        self._has_asked = True
        with suppress(RuntimeError):  # a cluster that cannot be asked is used as it is
            self._ask("ask_for_room", ANSWER_S)

    def start_attempt(self, num_workers: int, config: dict[str, Any]) -> None:
        """Begin to train with so many workers."""
        self._ask("start_attempt", ANSWER_S, num_workers=num_workers, config=config)

    def look(self) -> Any:
        """Return what has come of the attempt, None while it runs.

        Raises:
            RayLost: Nothing can come of it any more.
        """
        self._check_head()
        return self._ask("look", ANSWER_S)

    def close(self, *, at_once: bool = False) -> None:
        """Leave the cluster, which ends all that we run there.

        Args:
            at_once: Wait for nothing, because it is known to answer no more.
        """
        process, self._process, self._head = self._process, None, None
        if process is not None:
            self._end(process, at_once=at_once)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _end(self, process: subprocess.Popen[bytes], *, at_once: bool) -> None:
        family = _family(process.pid)
        if self._connection is not None:
            self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(0 if at_once else CLOSE_S)
        process.kill()
        process.wait()
        for one in family:  # those of a Ray of our own, if it did not end
            with suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(family, CLOSE_S)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._scratch = cluster.scratch_folder()
        with theirs:
            self._process = subprocess.Popen(
                command_of("dmuon_platform.ray_process", str(theirs.fileno()), str(self._scratch)),
                stdin=subprocess.DEVNULL,
                cwd=self._working_folder(self._scratch),
                env=environment(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the driver, which then saves
            )
        self._connection = Connection(ours.detach())

    def _working_folder(self, scratch: Path) -> Path:
        """Return where to connect from: neither Ray nor torch starts in a folder that is gone.

        Workers of a Ray of our own inherit it, and look up relative paths of text from there.
        """
        is_own = cluster.address_of(self._spec) is None
        return self._folder if is_own and self._folder.is_dir() else scratch

    def _ask(self, request: str, timeout_s: float | None, **arguments: Any) -> Any:
        if self._connection is None or self._process is None:
            raise RayLost("there is no connection to Ray")
        try:
            self._connection.send((request, arguments))
            self._wait_for_answer(self._connection, timeout_s)
            value, error = self._connection.recv()
        except (EOFError, OSError) as gone:
            raise RayLost("the process that was connected to Ray has ended") from gone
        if error is not None:
            raise error
        return value

    def _wait_for_answer(self, connection: Connection, timeout_s: float | None) -> None:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not connection.poll(max(0.0, min(PROBE_S, deadline - time.monotonic()))):
            self._check_head()  # who is connected to one that is gone may never answer
            if time.monotonic() >= deadline:
                raise RayLost(f"Ray did not answer within {timeout_s:g} s")

    def _check_head(self) -> None:
        """Look, now and then, whether the head of a Ray of our own still lives.

        Ray itself waits a minute for a head that may come back; ours does not.
        """
        if self._head is None or time.monotonic() - self._probed < PROBE_S:
            return
        self._probed = time.monotonic()
        try:
            socket.create_connection(self._head, timeout=PROBE_S).close()
        except OSError as error:
            raise RayLost(f"the head of the local Ray is gone ({error})") from error


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
