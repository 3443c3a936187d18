"""``heartbeats/``: how far each rank of the present attempt is, and since when.

Every rank writes one small file, again and again, from a thread of its own. So a rank that waits
beats on and says for what; one that is frozen beats no more. The process in which Ray steers them
has a file too, of which only the time counts. Where there is no room to write, the time of a file
is still set: a full disk does not look like the end of a process. Each attempt has other files,
since ranks of an earlier one may live on where nobody reaches them.
"""

import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path

from dmuon_platform.durable_file import read_object, write_whole

HEARTBEATS_FOLDER = "heartbeats"
STACKS_FOLDER = "stacks"
"""Python stacks of ranks that were stuck: ``attempt-2-rank-00001.txt``."""


class Phase(StrEnum):
    """What a rank is at."""

    START = "start"
    """Building the model and its mesh, restoring, up to the end of the first step."""

    DATA = "data"
    """Reading its samples: waits for nobody."""

    COMPUTE = "forward_backward"
    OPTIMIZER = "optimizer"
    EVALUATE = "evaluate"
    SAVE = "save"
    """Copying, writing or committing a checkpoint."""

    END = "end"
    """After the last step."""


@dataclass(frozen=True)
class Heartbeat:
    """One rank at one moment.

    Attributes:
        attempt: Its attempt's number.
        rank: In the attempt, from 0.
        host: Its machine.
        pid: Its process there.
        step: Optimizer steps done.
        phase: What it is at.
        count: How often it has come forward in this attempt. All ranks do the same in the same
            order, so the one with the fewest is the one that the others wait for.
        progress: Unix time at which it last came forward: a phase, a micro-batch.
        time: Unix time of this beat, by the clock of its machine.
        is_stuck: Whether it takes itself for stuck, and is about to end for that.
    """

    attempt: int
    rank: int
    host: str
    pid: int
    step: int
    phase: Phase
    count: int
    progress: float
    time: float
    is_stuck: bool = False


class Heartbeats:
    """The heartbeats of one run: one file a rank, and only those of the present attempt."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / HEARTBEATS_FOLDER

    def write(self, beat: Heartbeat) -> None:
        """Replace a rank's file.

        Raises:
            OSError: It cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"attempt-{beat.attempt}-rank-{beat.rank:05d}.json"
        try:
            write_whole(path, json.dumps(asdict(beat)) + "\n", durable=False)
        except OSError:
            with suppress(FileNotFoundError):
                os.utime(path)
            raise

    def read(self, attempt: int | None = None) -> list[Heartbeat]:
        """Return the last beat of every rank, in the order of ranks.

        Args:
            attempt: Whose; by default of the newest attempt that beats.
        """
        contents = [read_object(path) for path in self.folder.glob("*-rank-*.json")]
        beats = [beat for content in contents if content and (beat := _beat_of(content))]
        newest = max((beat.attempt for beat in beats), default=0)
        wanted = newest if attempt is None else attempt
        return sorted((b for b in beats if b.attempt == wanted), key=lambda beat: beat.rank)

    def clear(self) -> None:
        """Forget all, before another attempt, which may have fewer ranks."""
        for path in self.folder.glob("attempt-*"):
            with suppress(OSError):
                path.unlink()

    def beat_for_controller(self, attempt: int, every_s: float) -> None:
        """Set the time of the controller's file again and again, as long as this process runs.

        Args:
            attempt: Whose controller this is.
            every_s: Seconds between two times.
        """
        path = self._of_controller(attempt)

        def beat() -> None:
            while True:
                with suppress(OSError):
                    self.folder.mkdir(parents=True, exist_ok=True)  # it is there before any rank
                    path.touch()
                time.sleep(every_s)

        threading.Thread(target=beat, name="beat", daemon=True).start()

    def signs(self, attempt: int) -> tuple[int, int]:
        """Return when a rank, and when the controller, of an attempt last gave a sign.

        In nanoseconds by the clock of the storage, so only a change says something; 0 for never.
        """
        ranks = self.folder.glob(f"attempt-{attempt}-rank-*.json")
        return max(map(_changed, ranks), default=0), _changed(self._of_controller(attempt))

    def _of_controller(self, attempt: int) -> Path:
        return self.folder / f"attempt-{attempt}-controller"


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _beat_of(content: dict[str, object]) -> Heartbeat | None:
    names = [field.name for field in fields(Heartbeat)]
    try:
        known = {name: content[name] for name in names if name in content}
        return Heartbeat(**{**known, "phase": Phase(str(content["phase"]))})  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError):
        return None
