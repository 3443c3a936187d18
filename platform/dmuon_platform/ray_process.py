"""The process that is connected to Ray, so that the driver is not.

Ray ends a process that has lost its head, without asking it. What a run needs to go on, its lease,
its tracker, its supervisor, must therefore live elsewhere: `ray_session` starts this, talks to it,
and starts another when it is gone. When the driver is gone, this ends by itself.
"""

import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack, chdir, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dmuon_platform import cluster
from dmuon_platform.data import prepare_dataset
from dmuon_platform.elastic import NodeRoom
from dmuon_platform.errors import PlatformError
from dmuon_platform.spec import JobSpec

EVERY_S = 0.2
"""Seconds between two looks whether the driver still lives."""


class Service:
    """What the driver may ask for; every method is one request."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._connection = ExitStack()
        self._attempt: Any = None
        self._has_asked = False

    def connect(self, spec: dict[str, Any]) -> str:
        """Join or start the cluster; return the address of its head."""
        self._spec = JobSpec.model_validate(spec)
        address = self._connection.enter_context(cluster.connected(self._spec, self._scratch))
        # Ray has set its own: a request to stop is the driver's business.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return address

    def prepare(self, folder: Path, here: Path) -> Any:
        """Return the dataset, prepared if it is not there; relative paths start at ``here``."""
        with chdir(here) if here.is_dir() else nullcontext():
            return prepare_dataset(self._spec.data, folder)

    def room(self) -> list[NodeRoom]:
        """Return what is free in the cluster."""
        return cluster.free_room()

    def ask_for_room(self) -> None:
        """Ask an autoscaler for machines for all workers, as long as this is connected."""
        self._has_asked = True
        cluster.ask_for_room(self._spec, self._spec.fitting_workers[-1])

    def start_attempt(self, num_workers: int, config: dict[str, Any]) -> None:
        """Begin to train with so many workers."""
        from dmuon_platform.attempts import Attempt  # imports ray, which `cluster` prepares for

        self._attempt = Attempt(self._spec, num_workers, config)

    def look(self) -> Any:
        """Return what has come of the attempt, None while it runs."""
        return self._attempt.outcome

    def close(self) -> None:
        """Leave the cluster; one of our own ends with that."""
        if self._has_asked:
            _call(cluster.ask_for_room, {"spec": self._spec, "num_workers": 0})
        self._connection.close()


def serve(connection: Connection, scratch: Path) -> None:
    """Answer the driver until it has no more to ask, or is gone."""
    service = Service(scratch)
    try:
        while True:
            name, arguments = connection.recv()
            answer = _answer(getattr(service, name), arguments, connection)
            connection.send(answer)
    except (EOFError, OSError):
        pass  # the driver has closed its end
    finally:
        service.close()
        shutil.rmtree(scratch, ignore_errors=True)


def _answer(
    method: Callable[..., Any], arguments: dict[str, Any], connection: Connection
) -> tuple[Any, BaseException | None]:
    if method.__name__ == "connect":
        return _call(method, arguments)  # signal handlers are set in the main thread
    answers: list[tuple[Any, BaseException | None]] = []
    thread = threading.Thread(target=lambda: answers.append(_call(method, arguments)), daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(EVERY_S)
        if connection.poll(0):  # it asks one thing at a time, so this is the end
            raise EOFError
    return answers[0]


def _call(
    method: Callable[..., Any], arguments: dict[str, Any]
) -> tuple[Any, BaseException | None]:
    try:
        return method(**arguments), None
    except (PlatformError, OSError) as error:
        return None, error
    except Exception as error:  # it may not survive pickling; its text does
        told = RuntimeError(f"{type(error).__name__}: {error}")
        told.add_note(traceback.format_exc())  # for the console; the journal has the line above
        return None, told


def main() -> None:
    """Serve on the connection whose handle is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve(Connection(int(sys.argv[1])), Path(sys.argv[2]))
    os._exit(0)  # threads of Ray may not want to end


if __name__ == "__main__":
    main()
