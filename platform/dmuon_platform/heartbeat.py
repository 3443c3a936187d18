"""``heartbeats/``: how far each rank of the present attempt is, and since when.

Every rank writes one small file, again and again, from a thread of its own. So a rank that waits
beats on and says for what; one that is frozen beats no more.
"""

import json
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
        path = self.folder / f"rank-{beat.rank:05d}.json"
        write_whole(path, json.dumps(asdict(beat)) + "\n", durable=False)

    def read(self, attempt: int | None = None) -> list[Heartbeat]:
        """Return the last beat of every rank, in the order of ranks.

        Args:
            attempt: Whose; by default of the newest attempt that beats.
        """
        contents = [read_object(path) for path in self.folder.glob("rank-*.json")]
        beats = [beat for content in contents if content and (beat := _beat_of(content))]
        newest = max((beat.attempt for beat in beats), default=0)
        wanted = newest if attempt is None else attempt
        return sorted((b for b in beats if b.attempt == wanted), key=lambda beat: beat.rank)

    def clear(self) -> None:
        """Forget all, before another attempt, which may have fewer ranks."""
        for path in self.folder.glob("rank-*.json"):
            with suppress(OSError):
                path.unlink()


def _beat_of(content: dict[str, object]) -> Heartbeat | None:
    names = [field.name for field in fields(Heartbeat)]
    try:
        known = {name: content[name] for name in names if name in content}
        return Heartbeat(**{**known, "phase": Phase(str(content["phase"]))})  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError):
        return None
