"""Who may write to a run: one attempt, the newest; older ones that still live are refused."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dmuon_platform.durable_file import write_whole
from dmuon_platform.errors import PlatformError
from dmuon_platform.event_facts import whole
from dmuon_platform.events import Journal

ATTEMPT_FILE = "attempt"
LOCK_FILE = "attempt.lock"


class StaleAttempt(PlatformError):  # noqa: N818 - names the thing
    """An attempt tried to write to a run that a newer attempt has taken over."""

    def __init__(self, run_dir: Path, attempt: int, newest: int) -> None:
        super().__init__(run_dir, attempt, newest)
        self.run_dir = run_dir
        self.attempt = attempt
        self.newest = newest

    def __str__(self) -> str:
        return (
            f"attempt {self.attempt} may no longer write to {self.run_dir}: attempt {self.newest} "
            "has taken the run over. Nothing was changed; this process should end."
        )


class Lease:
    """The attempt number of a run, kept in a file beside a lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def acquire(self) -> int:
        """Take the run over from any earlier attempt; return this attempt's number, from 1."""
        with self._locked():
            attempt = max(self.newest(), self._newest_told()) + 1
            write_whole(self._folder / ATTEMPT_FILE, f"{attempt}\n")
        return attempt

    def newest(self) -> int:
        """Return the number of the newest attempt, 0 before the first."""
        try:
            return int((self._folder / ATTEMPT_FILE).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # lost or damaged, unless this is the start
            return self._newest_told()

    def _newest_told(self) -> int:
        """Return it by the journal: with a number that comes twice an older attempt could write."""
        events = Journal(self._folder).read()
        return max((whole(event, "attempt") or 0 for event in events), default=0)

    @contextmanager
    def held(self, attempt: int | None) -> Iterator[None]:
        """Keep others from taking over or committing meanwhile; hold it briefly.

        Args:
            attempt: Must be the newest; None for somebody who is no attempt.

        Raises:
            StaleAttempt: There is a newer attempt.
        """
        with self._locked():
            newest = self.newest()
            if attempt is not None and attempt < newest:
                raise StaleAttempt(self._folder, attempt, newest)
            yield

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # released by the kernel when this process dies
            yield
        finally:
            os.close(handle)
