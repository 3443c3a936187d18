"""Loading a checkpoint on any mesh: every rank reads the slices that it needs, and nothing else.

Everything is checked on all ranks before anything changes.
"""

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dmuon import dedication as dedications
from dmuon import torch_internals
from dmuon.call_order import Call
from dmuon.checkpoint.content import (
    Entry,
    ModuleEntry,
    OwnedEntry,
    PlainEntry,
    ShardedEntry,
)
from dmuon.checkpoint.fit import Fit, manifest_of
from dmuon.checkpoint.gathering import is_in_rows, row_bounds
from dmuon.checkpoint.host_memory import fresh, fresh_like
from dmuon.checkpoint.meeting import tell_all
from dmuon.checkpoint.source import Source, open_source
from dmuon.checkpoint.verification import share_out
from dmuon.dedication import Dedication
from dmuon.errors import CheckpointError
from dmuon.flags import check_flags
from dmuon.model_state import module_of
from dmuon.optimizer import Muon
from dmuon.optimizer_state import MOMENTS, dedication_of, live_group, symmetric_params
from dmuon.parcel import MASTER_DTYPE
from dmuon.splits import other_splits, warn_of_other_splits


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What was loaded, equal on all ranks.

    Attributes:
        path: from where.
        step: optimizer steps done; 0 where the source does not say.
        extra: the plain data that was given to ``save_checkpoint``.
        missing: weights of the model that were not there, with ``strict=False``.
        unexpected: weights there that the model does not have, with ``strict=False``.
        other_splits: parameters that the optimizer updates in other parts than before, and how.
    """

    path: Path
    step: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    other_splits: Mapping[str, str] = field(default_factory=dict)


@torch.no_grad()
@torch_internals.outside_inference_mode()
def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Muon | None = None,
    *,
    strict: bool = True,
    verify_hashes: bool | Literal["sha256"] = True,
    convert_dtype: bool = False,
) -> LoadedCheckpoint:
    """Load weights, and the optimizer's state, on any mesh. Collective over the mesh.

    When parameters are split otherwise than they were, a warning on the first rank names them: the
    momentum is the same, the updates are not.

    Args:
        path: a checkpoint of `save_checkpoint`. Weights alone also come from a Hugging Face folder
            or a single file (``.safetensors``, ``.bin``, ``.pt``; nothing in it is run).
        model: as given to ``dedicate_params``.
        optimizer: its ``dmuon.Muon``; None loads weights alone.
        strict: refuse missing and unexpected weights; otherwise load what is there and report.
        verify_hashes: read every file once more and compare its checksum, which no accident
            passes; the ranks share the work. ``"sha256"`` compares SHA-256 instead, which is
            several times as slow and finds also what was changed on purpose; so does True where
            the manifest has no checksums. False compares no contents. Sizes are always compared.
        convert_dtype: allow weights of another dtype than the model's.

    Raises:
        DamagedCheckpointError: on every rank: the checkpoint is not whole, or has changed.
        CheckpointError: on every rank: it does not fit; nothing was changed. The exception is a
            file that fails while it is read: the error says so, and the model must be loaded again.
    """
    check_flags(strict=strict, convert_dtype=convert_dtype)
    dedication = dedications.of(model) if optimizer is None else dedication_of(model, optimizer)
    dedication.settle_for(Call.LOAD_CHECKPOINT)
    folder = Path(path)
    source = _open(path, dedication, verify_hashes)
    fit = Fit(dedication, optimizer, source, convert_dtype)
    missing, unexpected = _check(fit, strict)
    reading = _Reading(fit)
    problem = _attempt(reading.read)
    problems = [p for p in tell_all(dedication, problem) if p]
    if problems:
        raise CheckpointError(
            folder, f"reading failed halfway, so the model must be loaded again: {problems[0]}"
        )
    dedication.unfilled -= reading.filled
    dedication.engine.publish(wait=True)
    different = _other_splits(fit) if optimizer is not None else {}
    if dedication.owner_map.rank == 0:
        warn_of_other_splits(str(folder), different)
    manifest = fit.manifest
    step, extra = (0, {}) if manifest is None else (manifest.step, manifest.extra)
    return LoadedCheckpoint(folder, step, extra, tuple(missing), tuple(unexpected), different)


def _other_splits(fit: Fit) -> dict[str, str]:
    """Empty, too, where the checkpoint does not tell."""
    facts = fit.optimizer_facts
    if facts is None or facts.splits is None:
        return {}
    return other_splits(facts.splits, fit.dedication.params)


def _open(
    path: str | os.PathLike[str], dedication: Dedication, hashes: bool | Literal["sha256"]
) -> Source:
    """Open and verify; each rank looks at its share of the files. Collective over the mesh."""
    folder = Path(path)
    opened: list[Source] = []
    me, size = dedication.owner_map.rank, dedication.owner_map.num_owners

    def open_mine() -> None:
        if not isinstance(hashes, bool) and hashes != "sha256":
            raise ValueError(f"verify_hashes must be True, False or 'sha256', got {hashes!r}")
        source = open_source(path)
        mine = share_out(source.files, size)[me]
        source.verify(hashes=bool(hashes), fast=hashes is True, only=mine)
        opened.append(source)

    problem: CheckpointError | None = None
    try:
        open_mine()
    except CheckpointError as error:
        problem = error
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = CheckpointError(folder, f"it cannot be read: {type(error).__name__}: {error}")
    for found in tell_all(dedication, problem):
        if found is not None:
            raise found
    source = opened[0]
    manifest = manifest_of(source)
    digest = source.names if manifest is None else manifest.digest()
    if len({str(each) for each in tell_all(dedication, digest)}) > 1:
        raise CheckpointError(
            folder, "the ranks see different checkpoints there; they must share the storage"
        )
    return source


def _check(fit: Fit, strict: bool) -> tuple[list[str], list[str]]:
    """Compare what is there with what is needed; nothing changes. Collective over the mesh.

    Returns:
        Weights that are missing, and those that are not expected.

    Raises:
        CheckpointError: on every rank, listing what does not fit.
    """
    missing: list[str] = []
    unexpected: list[str] = []
    problems: list[str] = []
    try:
        missing, unexpected = fit.other_names()
        problems += [f"{name}: missing" for name in missing] if strict else []
        problems += [f"{name}: not in this model" for name in unexpected] if strict else []
        problems += fit.misfits()
    except Exception as error:  # a file that fails here alone; the other ranks must hear of it
        problems.append(f"{type(error).__name__}: {error}")
    everyones = [p for each in tell_all(fit.dedication, problems) for p in each]
    if everyones:
        shown = "\n  ".join(list(dict.fromkeys(everyones))[:20])
        raise CheckpointError(fit.source.path, f"it does not fit, nothing was loaded:\n  {shown}")
    return missing, unexpected


@dataclass
class _Reading:
    """Reads what fits to where it belongs."""

    fit: Fit
    filled: set[str] = field(default_factory=set)

    def read(self) -> None:
        """Read what this rank needs. Local."""
        if self.fit.optimizer is not None:
            self.fit.optimizer.state.clear()
        for entry in self.fit.content.entries:
            name = self.fit.name_of(entry)
            if name is not None and not isinstance(entry, ModuleEntry):
                self._read_entry(entry, name)
        self._read_module_state()
        if self.fit.optimizer is not None:
            self._read_optimizer(self.fit.optimizer)

    def _read_entry(self, entry: Entry, name: str) -> None:
        if isinstance(entry, OwnedEntry):
            self._read_owned(entry, name)
        elif isinstance(entry, ShardedEntry):
            self._fill(entry.value, name)
        elif isinstance(entry, PlainEntry):
            self.fit.read_into(entry.value, name)

    def _read_module_state(self) -> None:
        kept = self.fit.source.module_state
        for name in self.fit.module_names:
            if name in kept:
                value = copy.deepcopy(kept[name])
            elif name in self.fit.weights:
                value = self.fit.holder(name).read(name).to(self.fit.dedication.device)
            else:
                continue
            module_of(self.fit.dedication, name).set_extra_state(value)

    def _read_owned(self, entry: OwnedEntry, name: str) -> None:
        if entry.kind == "weight":
            self.filled.add(entry.param.name)
        if entry.parcel.master is None:
            return
        if entry.kind == "weight" and self.fit.has_master(entry.param.name):
            name = f"master_weight/{entry.param.name}"
        if entry.kind == "momentum_buffer":
            assert self.fit.optimizer is not None
            momentum = fresh(entry.shape, MASTER_DTYPE, entry.parcel.device)
            self.fit.read_into(momentum, name)
            self.fit.optimizer.state[entry.param.param] = {"momentum_buffer": momentum}
        else:
            self.fit.read_into(entry.parcel.view(entry.parcel.master, entry.param), name)

    def _fill(self, target: torch.Tensor, name: str) -> None:
        """Read into ``target`` what this rank holds of it."""
        if not isinstance(target, DTensor):
            self.fit.read_into(target, name)
        elif is_in_rows(target):
            coordinate = target.device_mesh.get_coordinate()
            assert coordinate is not None  # checked at set-up
            bounds = row_bounds(target.shape[0], target.device_mesh.size(-1))
            self.fit.read_into(target.to_local(), name, slice(*bounds[coordinate[-1]]))
        else:
            whole = self.fit.holder(name).read(name).to(target.device)
            mesh, placements = target.device_mesh, target.placements
            share = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            target.to_local().copy_(share.to_local())

    def _read_optimizer(self, optimizer: Muon) -> None:
        facts = self.fit.optimizer_facts
        assert facts is not None  # else it would not fit
        for name, param in symmetric_params(optimizer).items():
            if name in facts.steps:
                state = {"step": torch.tensor(float(facts.steps[name]), dtype=torch.float32)}
                for moment in MOMENTS:
                    state[moment] = fresh_like(param)
                    self._fill(state[moment], f"{moment}/{name}")
                optimizer.state[param] = state
        for group, saved in self.fit.paired_groups(optimizer) or ():
            group.update(live_group(saved))
        optimizer.num_steps = facts.num_steps


def _attempt(do: Callable[[], None]) -> str | None:
    try:
        do()
    except Exception as error:  # whatever it is, all ranks must hear of it
        return f"{type(error).__name__}: {error}"
    return None
