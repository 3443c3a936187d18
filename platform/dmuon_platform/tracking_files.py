"""What the driver and the drain tell each other, as files in ``<run_dir>/tracking``."""

import json
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dmuon_platform.durable_file import write_whole

TRACKING_FOLDER = "tracking"


@dataclass(frozen=True)
class Description:
    """Everything a tracker is told about a run that is not in the run's other files."""

    uri: str
    """Of the MLflow server or database, without credentials."""
    experiment: str
    run_name: str
    run_key: str
    """Finds the run again, whoever asks; made once for each run folder."""
    params: dict[str, str]
    """The resolved job, flat."""
    job_toml: str
    facts: dict[str, Any] = field(default_factory=dict)
    """Of the driver: git state, dataset."""
    artifact_folder: str | None = None
    """Where artifacts go when no server takes them; None: the server decides."""
    model_name: str | None = None
    """Under which the exported model is registered; None: it is not."""
    model_alias: str | None = None
    checkpoint_artifacts: str = "manifest"
    log_every: int = 1


@dataclass
class Delivered:
    """How far the tracker has been told; written after each delivery, so it may lag behind."""

    uri: str = ""
    experiment_id: str | None = None
    run_id: str | None = None
    offsets: dict[str, int] = field(default_factory=dict)
    """Bytes of curves delivered, by name of the file."""
    recorded: int = 0
    """Bytes of the catalogue: of checkpoints whose manifests were delivered."""
    copied: int = 0
    """The same of those whose files were copied, as far as wanted."""
    not_copied: list[str] = field(default_factory=list)
    """Checkpoints that were pruned before that."""
    plans: list[str] = field(default_factory=list)
    model: dict[str, str] = field(default_factory=dict)
    """The registered export: its digest, model_id, name, version."""
    plots: str | None = None
    """What the pictures that were told show: sizes of the files they are drawn from."""
    status: str | None = None
    is_complete: bool = False
    problem: str | None = None
    """What the last try failed with; None when it did not."""


class TrackingFiles:
    """The files of one run's tracking."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / TRACKING_FOLDER
        self.lock = self.folder / "drain.lock"
        self.log = self.folder / "drain.log"
        self.scratch = self.folder / "tmp"

    def run_key(self) -> str:
        """Return the key of this run folder, made when first asked for."""
        path = self.folder / "run_key"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, uuid.uuid4().hex)
        return path.read_text(encoding="utf-8")

    def describe(self, description: Description) -> None:
        """Write the description for the drain."""
        self._write("description.json", asdict(description))

    def description(self) -> Description:
        """Read the description."""
        return Description(**self._read("description.json"))

    def description_or_none(self) -> Description | None:
        """Read the description, None if the run was never tracked."""
        try:
            return self.description()
        except TypeError:
            return None

    def want(self, status: str, end_time_ms: int | None = None, problem: str | None = None) -> None:
        """Write the status the tracker should show in the end, and why if it is not finished."""
        content = {"status": status, "end_time_ms": end_time_ms, "problem": problem}
        self._write("status.json", content)

    def wanted(self) -> tuple[str, int | None]:
        """Read the wanted status and when the run ended."""
        content = self._read("status.json")
        return content.get("status", "RUNNING"), content.get("end_time_ms")

    def problem(self) -> str | None:
        """Read why the run has not finished."""
        problem = self._read("status.json").get("problem")
        return None if problem is None else str(problem)

    def save(self, delivered: Delivered) -> None:
        """Write how far the tracker has been told."""
        self._write("delivered.json", asdict(delivered))

    def delivered(self) -> Delivered:
        """Read how far the tracker has been told; a lost or damaged file reads as nothing yet."""
        try:
            return Delivered(**self._read("delivered.json"))
        except TypeError:
            return Delivered()

    def _write(self, name: str, content: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / name, json.dumps(content, indent=1) + "\n")

    def _read(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}
