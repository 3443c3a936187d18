"""The checkpoints in a folder: which are whole, and what keeps others from being so. Local."""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dmuon.checkpoint.assignment import section_of
from dmuon.checkpoint.file_names import file_in, local_path
from dmuon.checkpoint.manifest import (
    MANIFEST_FILE,
    TORCH_METADATA_FILE,
    read_manifest,
    refuse_torch_checkpoint,
)
from dmuon.checkpoint.unfinished import MARK_FILE
from dmuon.checkpoint.verification import verify
from dmuon.errors import CheckpointError, DamagedCheckpointError

_HEAD_BYTES = 400
_STEP = re.compile(rb'^ "step": (\d{1,18}),$', re.MULTILINE)
"""Among the first lines of every manifest, before anything that somebody else chooses."""


@dataclass(frozen=True)
class ListedCheckpoint:
    """A whole checkpoint; sizes were compared, contents were not.

    Attributes:
        path: of its folder.
        step: optimizer steps done.
        created: seconds since the epoch.
        num_bytes: of all its files.
        has_optimizer: whether training can go on from it, or it holds weights alone.
        num_weights: tensors of the model in it.
    """

    path: Path
    step: int
    created: float
    num_bytes: int
    has_optimizer: bool
    num_weights: int


@dataclass(frozen=True)
class PassedOver:
    """A folder that is no whole checkpoint.

    Attributes:
        path: of the folder.
        reason: what is wrong with it.
        is_damaged: it was whole once. Otherwise it was never finished (it may still be being
            written), or it is of a format that this version of dmuon does not read.
    """

    path: Path
    reason: str
    is_damaged: bool


@dataclass(frozen=True)
class CheckpointList:
    """What is in a folder of checkpoints.

    Attributes:
        whole: oldest first: by step, then by time.
        passed_over: by name.
    """

    whole: tuple[ListedCheckpoint, ...]
    passed_over: tuple[PassedOver, ...]


def list_checkpoints(
    folder: str | os.PathLike[str], *, newest: int | None = None
) -> CheckpointList:
    """The checkpoints that lie directly in ``folder``, whatever they are called.

    Each manifest is read once and not kept, and of other files only the sizes are looked at. To
    have every byte compared call ``verify_checkpoint`` on the one that counts.

    Args:
        folder: that checkpoints were saved in. Folders in it without tensors are passed over.
        newest: how many whole ones to look for, those of the highest steps; what is older is not
            read, which saves time where there are thousands.

    Raises:
        ValueError: ``newest`` is less than 1.
        CheckpointError: there is no such folder, or it is itself a checkpoint, of ours or, with
            none of ours in it, of ``torch.distributed.checkpoint``.
    """
    if newest is not None and (type(newest) is not int or newest < 1):
        raise ValueError(f"newest must be a whole number of at least 1, got {newest!r}")
    folder = local_path(folder)
    _check_is_around(folder)
    whole: list[ListedCheckpoint] = []
    passed_over: list[PassedOver] = []
    candidates = list(_candidates(folder))
    if not candidates:
        refuse_torch_checkpoint(folder)
    if newest is not None:
        candidates.sort(key=_step_at_a_glance, reverse=True)
    for path in candidates:
        if len(whole) == newest:
            break
        try:
            whole.append(_listed(path))
        except CheckpointError as error:
            is_damaged = isinstance(error, DamagedCheckpointError) and _is_committed(path)
            passed_over.append(PassedOver(path, error.reason, is_damaged))
    whole.sort(key=lambda each: (each.step, each.created, each.path.name))
    passed_over.sort(key=lambda each: each.path.name)
    return CheckpointList(tuple(whole), tuple(passed_over))


def _check_is_around(folder: Path) -> None:
    if not folder.is_dir():
        what = "it is no folder" if folder.exists() else "there is no such folder"
        raise CheckpointError(folder, f"{what}; give the folder that checkpoints were saved in")
    if os.path.lexists(folder / MANIFEST_FILE):
        raise CheckpointError(
            folder, f"it is itself a checkpoint; give the folder around it: {folder.parent}"
        )


def _candidates(folder: Path) -> Iterator[Path]:
    """Folders that are checkpoints (also torch's), were ones or may become ones, by name."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir())
    for name in names:
        with os.scandir(folder / name) as entries:
            held = [entry.name for entry in entries]
        # empty: a save makes the folder before it writes anything
        is_one = not held or not {MANIFEST_FILE, MARK_FILE, TORCH_METADATA_FILE}.isdisjoint(held)
        if is_one or any(".safetensors" in each for each in held):
            yield folder / name


def _step_at_a_glance(path: Path) -> float:
    """What the first lines of a manifest say; infinite where they cannot, to be looked at."""
    try:
        with file_in(path, MANIFEST_FILE).open("rb") as file:
            found = _STEP.search(file.read(_HEAD_BYTES))
    except (OSError, CheckpointError):
        return math.inf
    return math.inf if found is None else int(found[1])


def _is_committed(path: Path) -> bool:
    return os.path.lexists(path / MANIFEST_FILE)


def _listed(path: Path) -> ListedCheckpoint:
    manifest = read_manifest(path)
    verify(path, manifest, hashes=False)
    return ListedCheckpoint(
        path=path,
        step=manifest.step,
        created=manifest.created,
        num_bytes=sum(facts.size for facts in manifest.files.values())
        + file_in(path, MANIFEST_FILE).stat().st_size,
        has_optimizer=manifest.optimizer is not None,
        num_weights=sum(
            len(tensors)
            for file, tensors in manifest.tensors.items()
            if section_of(file) == "model"
        ),
    )
