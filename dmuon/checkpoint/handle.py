"""What `save_checkpoint` returns: a save that may still be going on."""

import threading
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

from dmuon.checkpoint.background import run_beside
from dmuon.checkpoint.committing import Work
from dmuon.checkpoint.manifest import Manifest
from dmuon.checkpoint.snapshot import Snapshot
from dmuon.errors import CheckpointError


class SaveHandle:
    """A save that may still be going on.

    Attributes:
        path: the folder of the checkpoint.
    """

    def __init__(self, path: Path, snapshot: Snapshot, after: "SaveHandle | None" = None) -> None:
        self.path = path
        self._snapshot = snapshot
        self._after = after
        self._is_over = threading.Event()
        self._manifest: Manifest | None = None
        self._error: CheckpointError | None = None
        self._was_raised = False
        self._has_lost_group = False

    @property
    def done(self) -> bool:
        """Whether the checkpoint is committed, or has failed. Local."""
        return self._is_over.is_set()

    def wait_copied(self) -> None:
        """Wait until the values are in host memory, so that they may be changed by hand. Local.

        What belongs to DMuon, such as ``step`` and loading, waits by itself.
        Who changes values without waiting is told by an error of the save, but not of what is
        written through ``.data``, which torch does not count.
        """
        self._snapshot.wait()

    def wait(self) -> Manifest:
        """Wait until the checkpoint is committed; its manifest, equal on all ranks.

        Raises:
            CheckpointError: on every rank, when any could not write; no checkpoint was made.
        """
        self._is_over.wait()
        if self._error is not None:
            self._was_raised = True
            raise self._error
        assert self._manifest is not None
        return self._manifest

    def _unheard_error(self) -> CheckpointError | None:
        """Wait; what went wrong, if this rank has not been told yet."""
        self._is_over.wait()
        return None if self._was_raised else self._error

    def _run(self, work: Work, warns: bool = False) -> None:
        try:
            work.take()  # first of all: training may be waiting for it
            if self._after is not None:
                self._after._is_over.wait()
                self._after = None
            self._manifest = work.commit()
        except CheckpointError as error:  # kept for `wait`
            self._error = error
        except Exception as error:  # whatever it is, `wait` must tell
            self._error = CheckpointError(self.path, f"{type(error).__name__}: {error}")
        except BaseException as error:  # such as Ctrl-C, which the caller hears of by itself
            self._error = CheckpointError(self.path, f"interrupted by {type(error).__name__}")
            self._was_raised = True
            work.has_lost_group = True  # the others may be halfway through a collective
            raise
        finally:
            self._has_lost_group = work.has_lost_group
            try:
                if self._error is not None and warns:
                    warnings.warn(f"no checkpoint was made: {self._error}", stacklevel=1)
            finally:  # now the next save may begin
                self._is_over.set()

    def _run_beside(self, work: Work, timeout: timedelta) -> None:
        """Do it in a thread, for which a process that ends waits, for so long at most."""
        name = f"the checkpoint {self.path}"
        run_beside(partial(self._run, work, warns=True), name, timeout.total_seconds())
