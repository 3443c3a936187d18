"""SIGTERM, SIGHUP and Ctrl-C at the driver: a request to stop, with a checkpoint if it trains."""

import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

from dmuon_platform.errors import GracefulStop
from dmuon_platform.output import lead_nowhere
from dmuon_platform.stop_request import StopFile, StopRequest

NAMES = {
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGHUP, as its terminal is gone",
    signal.SIGINT: "Ctrl-C",
}
"""The reasons of requests that come from here."""


class StopSignals:
    """Hears signals as a context manager, in the main thread.

    While workers train, a signal becomes ``stop.json``, and they save and end. Before and after
    that there is nothing to save, so the driver raises `GracefulStop` where it is. Ctrl-C a second
    time ends it at once; another SIGTERM says nothing new. What is ignored when this begins, as
    SIGHUP is under ``nohup``, stays so.

    Args:
        run_dir: The folder of the run.
        launch: This one.
        say: Prints a line for the person who launched the job.
    """

    def __init__(self, run_dir: Path, launch: str, say: Callable[[str], None]) -> None:
        self._file = StopFile(run_dir)
        self._launch = launch
        self._say = say
        self._is_training = False
        self._end_view: Callable[[], None]
        self._reason: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._file.remove()  # an earlier launch was meant
        heard = [each for each in NAMES if signal.getsignal(each) is not signal.SIG_IGN]
        self._before = {each: signal.signal(each, self._hear) for each in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._file.remove()

    @contextmanager
    def training(self, end_view: Callable[[], None]) -> Iterator[None]:
        """While this lasts, whoever watches the workers honours the request.

        Args:
            end_view: Called before a request is answered, so that its answer is the last word.

        Raises:
            GracefulStop: A signal came when the training was about to end anyway.
        """
        self._end_view = end_view
        self._is_training = True
        try:
            yield
        finally:
            self._is_training = False
        if self._reason is not None:
            raise GracefulStop(f"Stopped by {self._reason} after the training.")

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _let_go_of_terminal()
        if self._reason is not None:
            if number == signal.SIGINT:
                self._say("Ctrl-C: ending at once, without another checkpoint")
                raise KeyboardInterrupt
            return  # `timeout` sends two, and the second may come within this very function
        name = self._reason = NAMES[signal.Signals(number)]
        if not self._is_training:
            raise GracefulStop(f"Stopped by {name}.")
        self._end_view()
        self._say(
            f"{name}: stopping, with a checkpoint after this step if the training has begun; "
            "Ctrl-C now ends it at once"
        )
        try:
            self._file.write(StopRequest.now(self._launch, name))
        except OSError as error:  # no checkpoint could be written either
            raise GracefulStop(f"Stopped by {name} without a checkpoint: {error}.") from error


def _let_go_of_terminal() -> None:
    """Print to nowhere from now on: writing to a terminal that is gone is an error."""
    # that one was a terminal cannot be asked any more
    lead_nowhere(*(each for each in (1, 2) if stat.S_ISCHR(os.fstat(each).st_mode)))
