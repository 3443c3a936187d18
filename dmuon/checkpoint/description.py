"""What a checkpoint holds, in short, and whether it is whole. Local; no process group is needed."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dmuon.checkpoint.assignment import SECTIONS, section_of
from dmuon.checkpoint.file_names import local_path
from dmuon.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    OptimizerFacts,
    read_manifest,
)
from dmuon.checkpoint.tensor_file import TensorReader
from dmuon.checkpoint.verification import verify
from dmuon.errors import CheckpointError, DamagedCheckpointError


@dataclass(frozen=True)
class SectionFacts:
    """The tensors of one section.

    Attributes:
        num_tensors: how many.
        num_bytes: of all their values.
        dtypes: bytes of values by type, as safetensors files name it.
    """

    num_tensors: int = 0
    num_bytes: int = 0
    dtypes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointDescription:
    """What the manifest of a checkpoint says, in short.

    Attributes:
        path: of the folder.
        step: optimizer steps done.
        created: seconds since the epoch.
        versions: of the packages that wrote it.
        mesh: sizes that it was written on.
        files: size in bytes of each by name, the manifest too.
        sections: ``"model"`` and ``"optim"``.
        tied: weights stored once: the other name, and the name that is in a file.
        optimizer: settings and step counters; None for weights alone.
        extra: plain data that was given to ``save_checkpoint``.
        unlisted: names of files in the folder that the manifest does not know.
        problem: why it is not whole, as far as names and sizes show; None when it is.
    """

    path: Path
    step: int
    created: float
    versions: Mapping[str, str]
    mesh: Mapping[str, int]
    files: Mapping[str, int]
    sections: Mapping[str, SectionFacts]
    tied: Mapping[str, str]
    optimizer: OptimizerFacts | None
    extra: Mapping[str, Any]
    unlisted: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return sum(self.files.values())


def describe_checkpoint(path: str | os.PathLike[str]) -> CheckpointDescription:
    """What a checkpoint holds. Reads its manifest and looks at sizes, and nothing else.

    Args:
        path: the folder of one checkpoint.

    Raises:
        DamagedCheckpointError: it has no manifest, or one that has changed.
        CheckpointError: there is no such folder, or it is of another format.
    """
    folder = checkpoint_folder(path)
    manifest = read_manifest(folder)
    problem: str | None = None
    try:
        verify(folder, manifest, hashes=False)
    except DamagedCheckpointError as error:
        problem = error.reason
    return _describe(folder, manifest, problem)


def verify_checkpoint(path: str | os.PathLike[str]) -> CheckpointDescription:
    """Compare every byte of a checkpoint with what was written.

    Args:
        path: the folder of one checkpoint.

    Returns:
        What it holds; it is whole.

    Raises:
        DamagedCheckpointError: it is not; the reason names every file that is missing, cut, grown
            or changed.
        CheckpointError: there is no such folder, or it is of another format.
    """
    folder = checkpoint_folder(path)
    manifest = read_manifest(folder)
    reader = TensorReader(folder, manifest)
    problems: list[str] = []
    for name in sorted(manifest.files):
        try:
            reader.verify(only=[name])
        except DamagedCheckpointError as error:
            problems.append(error.reason)
    if problems:
        raise DamagedCheckpointError(folder, "; ".join(problems))
    return _describe(folder, manifest, None)


def checkpoint_folder(path: str | os.PathLike[str]) -> Path:
    """``path``, which must be a folder that may be a checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    folder = local_path(path)
    if not folder.is_dir():
        what = "it is no folder" if folder.exists() else "there is no such folder"
        raise CheckpointError(folder, f"{what}; give the folder of a checkpoint")
    return folder


def _describe(folder: Path, manifest: Manifest, problem: str | None) -> CheckpointDescription:
    files = {name: facts.size for name, facts in sorted(manifest.files.items())}
    files[MANIFEST_FILE] = (folder / MANIFEST_FILE).stat().st_size
    found = {entry.name for entry in os.scandir(folder)}
    return CheckpointDescription(
        path=folder,
        step=manifest.step,
        created=manifest.created,
        versions=manifest.versions,
        mesh=manifest.mesh,
        files=files,
        sections={section: _section(manifest, section) for section in SECTIONS},
        tied=manifest.tied,
        optimizer=manifest.optimizer,
        extra=manifest.extra,
        unlisted=tuple(sorted(found - files.keys())),
        problem=problem,
    )


def _section(manifest: Manifest, section: str) -> SectionFacts:
    each = [
        facts
        for file, tensors in manifest.tensors.items()
        if section_of(file) == section
        for facts in tensors.values()
    ]
    dtypes: dict[str, int] = {}
    for facts in each:
        dtypes[facts.dtype] = dtypes.get(facts.dtype, 0) + facts.num_bytes
    return SectionFacts(len(each), sum(facts.num_bytes for facts in each), dtypes)
