"""Standard output of a run, which is a view of it: nobody has to look."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

_GONE = (errno.EPIPE, errno.EIO)
"""What writing says when the reader of a pipe has left, or a terminal has been closed."""


class Output:
    """A stream to which writing never fails: what cannot be shown is not shown.

    Args:
        stream: On a file descriptor, which leads nowhere from when on nobody can read from it.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write what can be written."""
        with self._unfailing():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write out what waits."""
        with self._unfailing():
            self._stream.flush()

    @contextmanager
    def _unfailing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _GONE:
                return
            lead_nowhere(self._stream.fileno())
            with suppress(OSError):
                print("dmuon: nobody reads the output any more; the run goes on", file=sys.stderr)


def standard_output() -> IO[str] | None:
    """Return where a run prints; None where it was started without any."""
    return None if sys.stdout is None else cast("IO[str]", Output(sys.stdout))


def lead_nowhere(*descriptors: int) -> None:
    """Throw away what is written to these file descriptors from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
