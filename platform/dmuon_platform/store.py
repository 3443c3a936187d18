"""The checkpoint store of a run: folders that are committed by their manifest, or do not count."""

import json
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from dmuon_platform import optimizer_tensors
from dmuon_platform.durable_file import sync, write_whole
from dmuon_platform.lease import Lease
from dmuon_platform.line_file import LineFile
from dmuon_platform.manifest import (
    MANIFEST_FILE,
    DamagedCheckpoint,
    Manifest,
    facts_of,
    read_manifest,
    verify,
)
from dmuon_platform.tied_weights import untie

CHECKPOINTS_FOLDER = "checkpoints"
MANIFESTS_FOLDER = "manifests"
"""A copy of every manifest, which stays when the checkpoint itself is pruned."""
DAMAGED_FILE = "damaged.jsonl"
"""Whole-looking checkpoints whose contents had changed, so that they are never pruned."""
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optim.safetensors"
CONFIG_FILE = "config.json"

_FOLDER = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"step-\d+\.writing-a(\d+)")
_PACKAGES = ("dmuon", "torch", "safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step


def _warn(damage: DamagedCheckpoint) -> None:
    warnings.warn(f"{damage}. It is left as it is and passed over.", stacklevel=2)


class CheckpointStore:
    """All checkpoints of one run, under ``<run_dir>/checkpoints``.

    A checkpoint is written under another name, its manifest last, and then renamed, so a folder
    is whole or does not count. Nothing that is damaged or half-written is ever deleted or reused.

    Args:
        run_dir: The folder of the run.
        on_damage: Told of every folder that is passed over, once; by default a warning.
    """

    def __init__(
        self, run_dir: Path, on_damage: Callable[[DamagedCheckpoint], None] = _warn
    ) -> None:
        self.run_dir = run_dir
        self.folder = run_dir / CHECKPOINTS_FOLDER
        self._on_damage = on_damage
        self._lease = Lease(run_dir)
        self._named: set[Path] = set()
        self._changed = LineFile(self.folder / DAMAGED_FILE)
        self._verified: Path | None = None

    def acquire_attempt(self) -> int:
        """Take the run over; from now on earlier attempts cannot commit. Returns the number."""
        return self._lease.acquire()

    def save(
        self,
        step: int,
        model_sd: Mapping[str, Tensor],
        optim_sd: Mapping[str, Any],
        extra: Mapping[str, Any],
        files: Mapping[str, bytes],
        *,
        attempt: int | None = None,
    ) -> Checkpoint:
        """Commit a checkpoint; when this returns it survives a crash of the machine.

        Args:
            step: Optimizer steps done.
            model_sd: Whole tensors by the names of the original model.
            optim_sd: As ``dmuon.get_optimizer_state_dict`` returns it.
            extra: Plain facts for the manifest.
            files: Further files by name, such as ``config.json``.
            attempt: Number of the attempt that saves; None outside of attempts.

        Raises:
            StaleAttempt: A newer attempt has taken the run over.
            OSError: It could not be written, such as on a full disk; nothing is left of it.
        """
        with self._lease.held(attempt):
            pass  # a stale attempt should not even start to write
        folder = self.folder / f"step-{step:08d}.writing-a{attempt or 0}"
        try:
            manifest = self._write(folder, step, model_sd, optim_sd, files)
            manifest = replace(manifest, **_origin(attempt or 0, extra))
            write_whole(folder / MANIFEST_FILE, manifest.to_json())
            with self._lease.held(attempt):
                saved = self._commit(folder, manifest)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # ours, and never a checkpoint
            raise
        self._verified = saved.path
        self._keep_manifest(saved)
        return saved

    def list(self) -> list[Checkpoint]:
        """Return the committed checkpoints, oldest first; sizes are checked, contents are not."""
        return list(self._whole(hashes=False))[::-1]

    def newest_verified(self) -> Checkpoint | None:
        """Return the newest checkpoint whose every byte is as it was written."""
        newest = next(self._whole(hashes=True), None)
        if newest is not None:
            self._verified = newest.path
        return newest

    def load(
        self, checkpoint: Checkpoint
    ) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
        """Read a checkpoint back.

        Returns:
            The model's state dict, the optimizer's and the extra facts, as they were saved.

        Raises:
            DamagedCheckpoint: It cannot be read (any more).
        """
        try:
            model_sd = load_file(checkpoint.path / MODEL_FILE)
            tensors = load_file(checkpoint.path / OPTIMIZER_FILE)
            optim_sd = optimizer_tensors.join(tensors, checkpoint.manifest.scalars)
        except Exception as error:  # safetensors raises many kinds for one thing
            raise DamagedCheckpoint(checkpoint.path, f"it cannot be loaded: {error}") from error
        for name, kept in checkpoint.manifest.tied.items():
            model_sd[name] = model_sd[kept]
        return model_sd, optim_sd, checkpoint.manifest.extra

    def prune(self, keep_last: int) -> None:
        """Delete old checkpoints; never the newest verified, nor anything damaged.

        Args:
            keep_last: How many of the newest whole ones stay, at least 1.
        """
        whole = self.list()[::-1]
        if self._verified not in {each.path for each in whole}:
            self.newest_verified()
        changed = {
            (each.content["folder"], each.content["created"]) for each in self._changed.lines()
        }
        for old in whole[max(keep_last, 1) :]:
            is_changed = (old.path.name, old.manifest.created) in changed
            if old.path != self._verified and not is_changed:
                self._keep_manifest(old)
                _delete(old.path)

    def _whole(self, *, hashes: bool) -> Iterator[Checkpoint]:
        """Yield whole checkpoints, newest first; name what is not one."""
        for path in sorted(self._folders(), reverse=True):
            try:
                manifest = read_manifest(path)
                verify(path, manifest, hashes=False)
                if hashes:
                    self._verify_contents(path, manifest)
            except DamagedCheckpoint as damage:
                self._name(damage)
            else:
                yield Checkpoint(path, manifest)

    def _verify_contents(self, path: Path, manifest: Manifest) -> None:
        try:
            verify(path, manifest)
        except DamagedCheckpoint as damage:
            facts = {"folder": path.name, "created": manifest.created, "reason": damage.reason}
            with suppress(OSError):  # a full disk: it is found again, if it is looked at again
                self._changed.append(facts)
            raise

    def _folders(self) -> Iterator[Path]:
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if _FOLDER.fullmatch(path.name) and path.is_dir():
                yield path
            elif unfinished := _UNFINISHED.fullmatch(path.name):
                attempt = int(unfinished[1])
                if attempt == 0 or attempt < self._lease.newest():  # else it is being written
                    reason = "it was never committed; the attempt that wrote it was stopped"
                    self._name(DamagedCheckpoint(path, reason))

    def _name(self, damage: DamagedCheckpoint) -> None:
        if damage.path not in self._named:
            self._named.add(damage.path)
            self._on_damage(damage)

    def _write(
        self,
        folder: Path,
        step: int,
        model_sd: Mapping[str, Tensor],
        optim_sd: Mapping[str, Any],
        files: Mapping[str, bytes],
    ) -> Manifest:
        _set_aside(folder, "killed")
        folder.mkdir(parents=True)
        kept, tied = untie(model_sd, json.loads(files.get(CONFIG_FILE, b"{}")))
        tensors, tree = optimizer_tensors.split(optim_sd)
        by_file = {MODEL_FILE: kept, OPTIMIZER_FILE: tensors}
        for name, content in by_file.items():
            # "format" is what transformers asks for before it reads a file
            whole = {key: _alone(value) for key, value in content.items()}
            save_file(whole, folder / name, metadata={"format": "pt"})
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return Manifest(
            step=step,
            attempt=0,
            files={name: facts_of(folder / name) for name in (*by_file, *files)},
            tensors={key: name for name, content in by_file.items() for key in content},
            tied=tied,
            scalars=tree,
        )

    def _commit(self, folder: Path, manifest: Manifest) -> Checkpoint:
        final = self.folder / f"step-{manifest.step:08d}"
        if final.exists():  # damaged, so an older one was gone on from and came here again
            _set_aside(final, "replaced")
        folder.rename(final)
        sync(self.folder)
        return Checkpoint(final, manifest)

    def _keep_manifest(self, checkpoint: Checkpoint) -> None:
        kept = self.run_dir / MANIFESTS_FOLDER / f"{checkpoint.path.name}.json"
        text = checkpoint.manifest.to_json()
        try:
            kept.parent.mkdir(exist_ok=True)
            if not kept.exists() or kept.read_text(encoding="utf-8") != text:
                write_whole(kept, text)
        except OSError as error:  # the checkpoint itself is good; trackers alone miss this copy
            warnings.warn(f"{kept} cannot be written: {error}", stacklevel=2)


def _alone(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous and in memory of its own, as safetensors wants it."""
    tensor = tensor.detach().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _origin(attempt: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "extra": json.loads(json.dumps(dict(extra))),  # as it will be read back
        "versions": {name: _version(name) for name in _PACKAGES},
        "created": time.time(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _set_aside(path: Path, why: str) -> None:
    """Move a folder out of the way under a name that no checkpoint has."""
    if not path.exists():
        return
    number = 1
    while (aside := path.with_name(f"{path.name}.{why}-{number}")).exists():
        number += 1
    path.rename(aside)


def _delete(folder: Path) -> None:
    """Delete a checkpoint so that it stops being one first, whatever happens meanwhile."""
    doomed = folder.with_name(f"{folder.name}.deleting")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
