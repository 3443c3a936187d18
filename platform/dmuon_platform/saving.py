"""Checkpoints of a training in motion: collective around the store, which rank 0 alone touches."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint as RayCheckpoint
from ray.train import CheckpointUploadMode
from torch import Tensor

import dmuon
from dmuon_platform.errors import Diverged
from dmuon_platform.events import Journal
from dmuon_platform.manifest import DamagedCheckpoint
from dmuon_platform.model import hf_config
from dmuon_platform.place import Place
from dmuon_platform.spec import JobSpec
from dmuon_platform.store import CONFIG_FILE, CheckpointStore
from dmuon_platform.training import Training

RAY_FOLDER = "ray"
"""Ray's own folder inside a run: its snapshot, and pointers to our checkpoints."""


class Saving:
    """Saves and restores one training, and mirrors every checkpoint to Ray."""

    def __init__(self, spec: JobSpec, place: Place, attempt: int, facts: Mapping[str, Any]) -> None:
        self._spec = spec
        self._place = place
        self._attempt = attempt
        self._facts = dict(facts)
        self._journal = Journal(spec.run_dir)
        self._store = CheckpointStore(spec.run_dir, self._on_damage)

    def restore(self, training: Training) -> int:
        """Load the newest verified checkpoint and return its step, 0 without one. Collective."""
        state: dict[str, Any] = {"model": {}, "optimizer": {}}

        def read() -> int:
            newest = self._store.newest_verified()
            if newest is None:
                return 0
            state["model"], state["optimizer"], _ = self._store.load(newest)
            return newest.step

        step = self._place.from_first("read the newest checkpoint", read)
        if step:
            dmuon.set_model_state_dict(training.model, state["model"])
            dmuon.set_optimizer_state_dict(training.model, training.optimizer, state["optimizer"])
        return step

    def save(self, training: Training, step: int, metrics: Mapping[str, float]) -> None:
        """Commit a checkpoint of the state after ``step`` steps. Collective.

        Raises:
            Diverged: A weight is not finite; on rank 0, which is then the cause of the end.
            PlatformError: Rank 0 could not write it; on all ranks.
        """
        model_sd = _on_first(dmuon.get_model_state_dict, training.model)
        optim_sd = _on_first(dmuon.get_optimizer_state_dict, training.model, training.optimizer)

        def write() -> Path:
            check_finite(step, model_sd)
            extra = {"metrics": dict(metrics), "mesh": self._place.sizes, **self._facts}
            files = {CONFIG_FILE: self._config(training)}
            saved = self._store.save(step, model_sd, optim_sd, extra, files, attempt=self._attempt)
            self._store.prune(self._spec.checkpoint.keep_last)
            return saved.path

        path = self._place.from_first(f"save the checkpoint of step {step}", write)
        self._mirror(step, path)

    def _config(self, training: Training) -> bytes:
        spec = self._spec
        config = hf_config(
            spec.model, spec.data.sequence_length, training.dataset.info.separator_id
        )
        return json.dumps(config, indent=2).encode()

    def _on_damage(self, damage: DamagedCheckpoint) -> None:
        self._journal.append("checkpoint_damaged", attempt=self._attempt, damage=str(damage))

    def _mirror(self, step: int, path: Path) -> None:
        """Tell Ray, with a pointer: Ray may then prune what it knows, and never our files."""
        checkpoint = None
        if self._place.is_first:
            folder = self._spec.run_dir / RAY_FOLDER / f"step-{step:08d}-a{self._attempt}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "pointer.json").write_text(json.dumps({"checkpoint": os.fspath(path)}))
            checkpoint = RayCheckpoint(os.fspath(folder))
        ray.train.report(
            {"step": step}, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD
        )


def _on_first(get: Any, *of: Any) -> dict[str, Any]:
    return get(*of, cpu_offload=True, rank0_only=True)


def check_finite(step: int, model_sd: Mapping[str, Tensor]) -> None:
    """Refuse weights that no training can go on from.

    Raises:
        Diverged: With the name of the first one.
    """
    for name, tensor in model_sd.items():
        if not torch.isfinite(tensor).all():
            raise Diverged(
                f"After step {step} the weight {name} is no longer finite, so no checkpoint was "
                "made of it; the newest one is from before. Lower optimizer.lr or "
                "optimizer.adamw_lr, or lengthen schedule.warmup_steps."
            )


def weights_digest(model_sd: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over names, shapes, dtypes and bytes of all weights, in order of name."""
    digest = hashlib.sha256()
    for name in sorted(model_sd):
        tensor = model_sd[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def final_weights_digest(training: Training) -> str | None:
    """Return `weights_digest` on rank 0, None elsewhere. Collective."""
    model_sd = _on_first(dmuon.get_model_state_dict, training.model)
    return weights_digest(model_sd) if training.place.is_first else None
