"""``stop.json``: somebody asks a running job to save a checkpoint and end.

Whoever wants a run to stop writes this file: the driver when it gets SIGTERM or Ctrl-C, a worker
that gets SIGTERM, ``dmuon stop`` from any machine that sees the storage, and the platform itself
when it wants to go on with other workers. Rank 0 looks for it between two steps.

A request is meant for one launch, named by the ``launch`` of its ``driver.json``, and for no other:
the file that an earlier launch has left behind is removed by the next one, which then runs.
"""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dmuon_platform.account import user_name
from dmuon_platform.durable_file import read_object, write_whole
from dmuon_platform.errors import GracefulStop

STOP_FILE = "stop.json"

LOOK_S = 0.5
"""Seconds between two looks at it."""


class After(StrEnum):
    """What follows once the checkpoint is there."""

    END = "end"
    """The command ends with exit code 75; started again, the run goes on."""

    RESTART = "restart"
    """The same launch goes on with another attempt, on as many workers as there is room for."""


@dataclass(frozen=True)
class StopRequest:
    """One request: which launch should stop, why, and who says so.

    Attributes:
        launch: The launch it is meant for, as in ``driver.json``.
        reason: In words, for the journal and the person who launched the job.
        after: What follows.
        by: User, process and host that asked.
        time: Unix time of the request.
    """

    launch: str
    reason: str
    after: After
    by: str
    time: float

    @classmethod
    def now(cls, launch: str, reason: str, after: After = After.END) -> "StopRequest":
        """Return a request from this process."""
        user = user_name() or f"user {os.getuid()}"
        by = f"{user}, process {os.getpid()} on {socket.gethostname()}"
        return cls(launch, reason, after, by, time.time())

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "StopRequest":
        """Read it back.

        Raises:
            KeyError, ValueError: It is not one.
        """
        return cls(
            launch=str(content["launch"]),
            reason=str(content["reason"]),
            after=After(content["after"]),
            by=str(content["by"]),
            time=float(content["time"]),
        )


class StopFile:
    """The ``stop.json`` of one run."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / STOP_FILE

    def write(self, request: StopRequest) -> None:
        """Ask. A request to end replaces one to restart, and never the other way round.

        Raises:
            OSError: The file cannot be written.
        """
        earlier = self.read(request.launch)
        if earlier is None or earlier.after == After.RESTART:
            write_whole(self.path, _json(request))

    def read(self, launch: str) -> StopRequest | None:
        """Return the request that is meant for ``launch``, if there is one."""
        content = read_object(self.path)
        try:
            request = None if content is None else StopRequest.from_dict(content)
        except (KeyError, TypeError, ValueError):
            return None  # written by something else; the next launch removes it
        return request if request is not None and request.launch == launch else None

    def remove_restart(self, launch: str) -> None:
        """Remove a request to restart, once that is done."""
        request = self.read(launch)
        if request is not None and request.after == After.RESTART:
            self.remove()

    def remove(self) -> bool:
        """Remove the file, whatever it says; return whether there was one."""
        try:
            self.path.unlink()
        except FileNotFoundError:
            return False
        return True


def pause(file: StopFile, launch: str, seconds: float) -> None:
    """Wait, unless somebody asks a launch to end.

    Raises:
        GracefulStop: Somebody does.
    """
    deadline = time.monotonic() + seconds
    while True:
        request = file.read(launch)
        if request is not None and request.after == After.END:
            raise GracefulStop(f"Stopped ({request.reason}).")
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(LOOK_S, left_s))


def _json(request: StopRequest) -> str:
    return json.dumps(asdict(request), indent=2) + "\n"
