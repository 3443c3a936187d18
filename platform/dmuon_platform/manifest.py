"""The manifest that makes a folder a checkpoint: what is in it, and whether it is whole."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dmuon_platform.durable_file import sync
from dmuon_platform.errors import PlatformError

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1


class DamagedCheckpoint(PlatformError):  # noqa: N818 - names the thing
    """A folder that is no whole checkpoint; ``str()`` says which and why."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path} is not a whole checkpoint: {self.reason}"


@dataclass(frozen=True)
class FileFacts:
    """One file of a checkpoint as it was written."""

    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything a checkpoint says about itself, apart from its tensors' values."""

    step: int
    """Optimizer steps done."""
    attempt: int
    """The attempt of the run that wrote it."""
    files: dict[str, FileFacts]
    """By file name; the manifest itself is not among them."""
    tensors: dict[str, str]
    """The file of each tensor by its name in that file."""
    tied: dict[str, str] = field(default_factory=dict)
    """Weights kept once: the other name, and the name that is in the file."""
    scalars: Any = None
    """The optimizer's state with references in place of its tensors."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the caller had to say: mesh, digest of the job, metrics."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of the packages that wrote it."""
    created: float = 0.0
    """Seconds since the epoch."""
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """Return the text of ``manifest.json``."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read the text of ``manifest.json``.

        Raises:
            ValueError: It is not a manifest, or one of a newer format.
        """
        content = json.loads(text)
        if not isinstance(content, dict) or "format_version" not in content:
            raise ValueError("it has no format_version")
        if content["format_version"] > FORMAT_VERSION:
            raise ValueError(
                f"its format version {content['format_version']} is newer than {FORMAT_VERSION}, "
                "the newest that this version of dmuon reads"
            )
        known = {each.name for each in fields(cls)}
        missing = {"step", "attempt", "files", "tensors"} - content.keys()
        if missing:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        files = {name: FileFacts(**facts) for name, facts in content.pop("files").items()}
        return cls(files=files, **{k: v for k, v in content.items() if k in known})

    def digest(self) -> str:
        """Return the SHA-256 over the names and contents of the files."""
        facts = {name: file.sha256 for name, file in sorted(self.files.items())}
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint folder.

    Raises:
        DamagedCheckpoint: There is none, or it cannot be read.
    """
    try:
        text = (folder / MANIFEST_FILE).read_text(encoding="utf-8")
        return Manifest.from_json(text)
    except FileNotFoundError:
        reason = f"it has no {MANIFEST_FILE}, so writing it was never finished"
        raise DamagedCheckpoint(folder, reason) from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        reason = f"its {MANIFEST_FILE} cannot be read: {error}"
        raise DamagedCheckpoint(folder, reason) from error


def verify(folder: Path, manifest: Manifest, *, hashes: bool = True) -> None:
    """Compare the files of a checkpoint with its manifest.

    Args:
        folder: The checkpoint.
        manifest: Its manifest.
        hashes: Read every file and compare its SHA-256 too.

    Raises:
        DamagedCheckpoint: With the first file that is missing, cut or changed.
    """
    for name, facts in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(folder, f"{name} is missing")
        if (size := path.stat().st_size) != facts.size:
            raise DamagedCheckpoint(folder, f"{name} has {size} bytes, not {facts.size}")
    for name, facts in manifest.files.items() if hashes else ():
        try:
            found = sha256_of(folder / name)
        except OSError as error:
            raise DamagedCheckpoint(folder, f"{name} cannot be read: {error}") from error
        if found != facts.sha256:
            raise DamagedCheckpoint(folder, f"{name} has changed since it was written (SHA-256)")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def facts_of(path: Path) -> FileFacts:
    """Return what a manifest says about a file, after making sure that it is on the disk."""
    sync(path)
    return FileFacts(path.stat().st_size, sha256_of(path))
