"""What was committed in a run, a line for each checkpoint: what listings and trackers go by.

It saves the reading of thousands of manifests and decides nothing by itself: whoever deletes or
loads a checkpoint reads its manifest, and a line that says something else is replaced.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dmuon_platform.backlog import Backlog
from dmuon_platform.line_file import LineFile
from dmuon_platform.metric_names import EVALUATION_LOSS

if TYPE_CHECKING:
    import dmuon  # brings torch, which the drain, that imports this, has no use for

CATALOGUE_FILE = "checkpoints.jsonl"
CHECKPOINTS_FOLDER = "checkpoints"
MANIFESTS_FOLDER = "manifests"
"""A copy of every manifest, which stays when the checkpoint itself is pruned."""


@dataclass(frozen=True)
class Entry:
    """What a manifest says, in short."""

    folder: str
    """Name of the checkpoint's folder."""
    step: int
    """Optimizer steps done."""
    created: float
    """Seconds since the epoch."""
    sha256: str
    """`dmuon.Manifest.digest`: over the names and contents of all files."""
    num_bytes: int
    """Of all files but the manifest."""
    evaluation_loss: float | None
    """Of the evaluation after that step; None without one, or when it was no number."""

    @classmethod
    def of(cls, folder: str, manifest: "dmuon.Manifest") -> "Entry":
        """Return the line of a checkpoint."""
        loss = manifest.extra.get("metrics", {}).get(EVALUATION_LOSS)
        return cls(
            folder=folder,
            step=manifest.step,
            created=manifest.created,
            sha256=manifest.digest(),
            num_bytes=sum(facts.size for facts in manifest.files.values()),
            evaluation_loss=None if loss is None or not math.isfinite(loss) else loss,
        )


class Catalogue:
    """``checkpoints.jsonl`` of one run; of two lines about one folder the later one counts."""

    def __init__(self, run_dir: Path) -> None:
        self._file = LineFile(run_dir / CATALOGUE_FILE)
        self._entries: dict[str, Entry] | None = None
        self._waiting = Backlog(self._file)

    def entries(self) -> Mapping[str, Entry]:
        """Return what is known by the names of folders, the deleted ones too."""
        return self._known()

    def add(self, entry: Entry) -> bool:
        """Write a line, unless it is there; return whether it says something new.

        Raises:
            OSError: It could not be written; the next call tries again.
        """
        known = self._known()
        is_new = known.get(entry.folder) != entry
        if is_new:
            known[entry.folder] = entry
            self._waiting.add(asdict(entry))
        self._waiting.write(sync=False)  # what is lost is made again
        return is_new

    def size(self) -> int:
        """Return the bytes on disk: no line starts behind that offset now."""
        return self._file.size()

    def read_from(self, offset: int, max_entries: int | None = None) -> tuple[list[Entry], int]:
        """Return the lines behind ``offset`` and the offset to go on from; 0 is the start."""
        found: list[Entry] = []
        for content, _, end in self._file.lines(offset):
            offset = end
            try:
                found.append(Entry(**content))
            except TypeError:  # of another version; read from its manifest when it is needed
                continue
            if len(found) == max_entries:
                break
        return found, offset

    def _known(self) -> dict[str, Entry]:
        if self._entries is None:
            found, _ = self.read_from(0)
            self._entries = {each.folder: each for each in found}
        return self._entries
