"""Loading a checkpoint on any mesh: every rank reads the slices that it needs, and nothing else.

Everything is checked on all ranks before anything changes.
"""

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dmuon import dedication as dedications
from dmuon import torch_internals
from dmuon.call_order import Call
from dmuon.checkpoint.content import (
    MODEL,
    Content,
    Entry,
    ModuleEntry,
    OwnedEntry,
    PlainEntry,
    ShardedEntry,
    content_of,
)
from dmuon.checkpoint.facts import TensorFacts
from dmuon.checkpoint.gathering import is_in_rows, row_bounds
from dmuon.checkpoint.manifest import Manifest
from dmuon.checkpoint.meeting import tell_all
from dmuon.checkpoint.source import CheckpointSource, Source, open_source
from dmuon.checkpoint.tensor_file import TensorReader
from dmuon.dedication import Dedication
from dmuon.errors import CheckpointError
from dmuon.groups import Group, pair_groups
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
    verify_hashes: bool = True,
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
        verify_hashes: read every file once more and compare its SHA-256; the ranks share the
            work. Sizes are compared in any case.
        convert_dtype: allow weights of another dtype than the model's.

    Raises:
        DamagedCheckpointError: on every rank: the checkpoint is not whole, or has changed.
        CheckpointError: on every rank: it does not fit; nothing was changed. The exception is a
            file that fails while it is read: the error says so, and the model must be loaded again.
    """
    dedication = dedications.of(model) if optimizer is None else dedication_of(model, optimizer)
    dedication.settle_for(Call.LOAD_CHECKPOINT)
    folder = Path(path)
    source = _open(path, dedication, verify_hashes)
    manifest = _manifest_of(source)
    content = content_of(dedication, optimizer, _trained(manifest))
    # the optimizer's present state says nothing about the one that is loaded
    content.entries = [
        entry
        for entry in content.entries
        if entry.section == MODEL
        or (isinstance(entry, OwnedEntry) and entry.kind == "momentum_buffer")
    ]
    loading = _Loading(dedication, optimizer, source, manifest, content, convert_dtype)
    missing, unexpected = loading.check(strict)
    problem = _attempt(loading.read)
    problems = [p for p in tell_all(dedication, problem) if p]
    if problems:
        raise CheckpointError(
            folder, f"reading failed halfway, so the model must be loaded again: {problems[0]}"
        )
    dedication.unfilled -= loading.filled
    dedication.engine.publish(wait=True)
    different = _other_splits(manifest, dedication) if optimizer is not None else {}
    if dedication.owner_map.rank == 0:
        warn_of_other_splits(str(folder), different)
    step, extra = (0, {}) if manifest is None else (manifest.step, manifest.extra)
    return LoadedCheckpoint(folder, step, extra, tuple(missing), tuple(unexpected), different)


def _other_splits(manifest: Manifest | None, dedication: Dedication) -> dict[str, str]:
    """Empty, too, where the checkpoint does not tell."""
    facts = None if manifest is None else manifest.optimizer
    if facts is None or facts.splits is None:
        return {}
    return other_splits(facts.splits, dedication.params)


def _open(path: str | os.PathLike[str], dedication: Dedication, hashes: bool) -> Source:
    """Open and verify; each rank looks at its share of the files. Collective over the mesh."""
    folder = Path(path)
    opened: list[Source] = []
    me, size = dedication.owner_map.rank, dedication.owner_map.num_owners

    def open_mine() -> None:
        source = open_source(path)
        source.verify(hashes=hashes, only=sorted(source.files)[me::size])
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
    manifest = _manifest_of(source)
    digest = source.names if manifest is None else manifest.digest()
    if len({str(each) for each in tell_all(dedication, digest)}) > 1:
        raise CheckpointError(
            folder, "the ranks see different checkpoints there; they must share the storage"
        )
    return source


def _manifest_of(source: Source) -> Manifest | None:
    return source.manifest if isinstance(source, CheckpointSource) else None


def _trained(manifest: Manifest | None) -> frozenset[str]:
    """Names of the dedicated parameters whose momentum is in the checkpoint."""
    if manifest is None:
        return frozenset()
    names = [name for tensors in manifest.tensors.values() for name in tensors]
    prefix = "momentum_buffer/"
    return frozenset(name.removeprefix(prefix) for name in names if name.startswith(prefix))


@dataclass
class _Loading:
    """One load: first `check`, then `read`."""

    dedication: Dedication
    optimizer: Muon | None
    source: Source
    manifest: Manifest | None
    content: Content
    converts: bool
    filled: set[str] = field(default_factory=set)

    def check(self, strict: bool) -> tuple[list[str], list[str]]:
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
            missing, unexpected = self._other_names()
            problems += [f"{name}: missing" for name in missing] if strict else []
            problems += [f"{name}: not in this model" for name in unexpected] if strict else []
            for entry in self.content.entries:
                problems += self._misfit(entry)
            if self.optimizer is not None:
                problems += self._optimizer_misfits(self.optimizer)
        except Exception as error:  # a file that fails here alone; the other ranks must hear of it
            problems.append(f"{type(error).__name__}: {error}")
        everyones = [p for each in tell_all(self.dedication, problems) for p in each]
        if everyones:
            shown = "\n  ".join(list(dict.fromkeys(everyones))[:20])
            raise CheckpointError(
                self.source.path, f"it does not fit, nothing was loaded:\n  {shown}"
            )
        return missing, unexpected

    def read(self) -> None:
        """Read what this rank needs. Local."""
        if self.optimizer is not None:
            self.optimizer.state.clear()
        for entry in self.content.entries:
            name = self._name_of(entry)
            if name is not None and not isinstance(entry, ModuleEntry):
                self._read_entry(entry, name)
        self._read_module_state()
        if self.optimizer is not None:
            self._read_optimizer(self.optimizer)

    def _other_names(self) -> tuple[list[str], list[str]]:
        """Weights, and what modules keep, that are missing, and that are not expected."""
        weights = [entry for entry in self.content.entries if entry.section == MODEL]
        wanted = [e.name for e in weights if not isinstance(e, ModuleEntry)]
        there = {e.name for e in weights if self._name_of(e) is not None}
        missing = [name for name in wanted if name not in there]
        missing += [name for name in self._module_names if name not in self._kept_names]
        known = {*wanted, *self._module_names, *self.content.tied}
        unexpected = [name for name in sorted(self._kept_names) if name not in known]
        return missing, unexpected

    def _misfit(self, entry: Entry) -> list[str]:
        name = self._name_of(entry)
        is_absent = name is None or (entry.section != MODEL and self.manifest is None)
        if is_absent or isinstance(entry, ModuleEntry):
            return []
        assert name is not None
        if entry.section != MODEL and name not in self._state_names:
            return [f"{name}: missing from the optimizer's state"]
        facts = self._facts(name)
        problems = []
        if facts.shape != tuple(entry.shape):
            problems.append(f"{name}: has shape {list(facts.shape)}, needs {list(entry.shape)}")
        if facts.torch_dtype != entry.dtype and entry.section == MODEL and not self.converts:
            problems.append(
                f"{name}: is {facts.torch_dtype}, the model has {entry.dtype}; pass "
                "convert_dtype=True to convert it"
            )
        if isinstance(entry, PlainEntry | ShardedEntry) and entry.value.is_meta:
            problems.append(f"{name}: is on the meta device; call model.to_empty(device=...) first")
        if isinstance(entry, PlainEntry) and _is_expanded(entry.value):
            problems.append(f"{name}: is expanded here, so it cannot be filled; clone() it first")
        return problems

    def _optimizer_misfits(self, optimizer: Muon) -> list[str]:
        facts = None if self.manifest is None else self.manifest.optimizer
        if facts is None:
            return ["it holds no state of an optimizer; load it without one, for weights alone"]
        if self._paired_groups(optimizer) is None:
            return ["param_groups: other parameters or another order than in this optimizer"]
        known = symmetric_params(optimizer).keys() | {p.name for p in self.dedication.params}
        strange = sorted(n for n in self._state_names if n.partition("/")[2] not in known)
        strange += sorted(facts.steps.keys() - symmetric_params(optimizer).keys())
        problems = [f"{name}: no such parameter in this optimizer" for name in strange]
        for name, param in symmetric_params(optimizer).items():
            if name in facts.steps:
                for moment in MOMENTS:
                    problems += self._state_misfit(f"{moment}/{name}", param.shape)
        for owned in self.dedication.params:
            if self._has_master(owned.name):
                problems += self._state_misfit(f"master_weight/{owned.name}", owned.shape)
        return problems

    def _paired_groups(self, optimizer: Muon) -> list[tuple[Group, Mapping[str, Any]]] | None:
        assert self.manifest is not None
        assert self.manifest.optimizer is not None
        saved = self.manifest.optimizer.param_groups
        return pair_groups(optimizer.param_groups, saved, self.dedication.model)

    def _state_misfit(self, name: str, shape: torch.Size) -> list[str]:
        if name not in self._state_names:
            return [f"{name}: missing from the optimizer's state"]
        found = self._facts(name).shape
        return [] if found == tuple(shape) else [f"{name}: has shape {found}, needs {tuple(shape)}"]

    def _has_master(self, name: str) -> bool:
        """Whether the float32 values of a weight are kept apart from it."""
        return self.optimizer is not None and f"master_weight/{name}" in self._state_names

    def _facts(self, name: str) -> TensorFacts:
        return self._holder(name).facts(name)

    def _read(self, name: str) -> torch.Tensor:
        return self._holder(name).read(name)

    def _read_into(self, target: torch.Tensor, name: str, rows: slice | None = None) -> None:
        self._holder(name).read_into(target, name, rows)

    def _holder(self, name: str) -> Source | TensorReader:
        """Where a tensor is read: among the weights, or the optimizer's state."""
        if isinstance(self.source, CheckpointSource) and name not in self._weights:
            return self.source.reader
        return self.source

    def _name_of(self, entry: Entry) -> str | None:
        """Under which name the source holds it: its own, or for a weight one that is tied to it."""
        if entry.section != MODEL:
            return entry.name
        aliases = [alias for alias, kept in self.content.tied.items() if kept == entry.name]
        return next((n for n in (entry.name, *aliases) if n in self._weights), None)

    @cached_property
    def _module_names(self) -> list[str]:
        """Of what modules of this model keep beside their tensors."""
        tensors = [e.name for e in self.content.entries if isinstance(e, ModuleEntry)]
        return [*tensors, *self.content.module_state]

    @cached_property
    def _kept_names(self) -> frozenset[str]:
        """Of all weights in the source, and of what modules kept beside them."""
        return self._weights.union(self.source.module_state)

    @cached_property
    def _weights(self) -> frozenset[str]:
        return frozenset(self.source.names)

    @cached_property
    def _state_names(self) -> frozenset[str]:
        if self.manifest is None:
            return frozenset()
        names = {name for tensors in self.manifest.tensors.values() for name in tensors}
        return frozenset(names - self._weights)

    def _read_entry(self, entry: Entry, name: str) -> None:
        if isinstance(entry, OwnedEntry):
            self._read_owned(entry, name)
        elif isinstance(entry, ShardedEntry):
            self._fill(entry.value, name)
        elif isinstance(entry, PlainEntry):
            self._read_into(entry.value, name)

    def _read_module_state(self) -> None:
        kept = self.source.module_state
        for name in self._module_names:
            if name in kept:
                value = copy.deepcopy(kept[name])
            elif name in self._weights:
                value = self._read(name).to(self.dedication.device)
            else:
                continue
            module_of(self.dedication, name).set_extra_state(value)

    def _read_owned(self, entry: OwnedEntry, name: str) -> None:
        if entry.kind == "weight":
            self.filled.add(entry.param.name)
        if entry.parcel.master is None:
            return
        if entry.kind == "weight" and self._has_master(entry.param.name):
            name = f"master_weight/{entry.param.name}"
        if entry.kind == "momentum_buffer":
            assert self.optimizer is not None
            momentum = torch.empty(entry.shape, dtype=MASTER_DTYPE, device=entry.parcel.device)
            self._read_into(momentum, name)
            self.optimizer.state[entry.param.param] = {"momentum_buffer": momentum}
        else:
            self._read_into(entry.parcel.view(entry.parcel.master, entry.param), name)

    def _fill(self, target: torch.Tensor, name: str) -> None:
        """Read into ``target`` what this rank holds of it."""
        if not isinstance(target, DTensor):
            self._read_into(target, name)
        elif is_in_rows(target):
            coordinate = target.device_mesh.get_coordinate()
            assert coordinate is not None  # checked at set-up
            bounds = row_bounds(target.shape[0], target.device_mesh.size(-1))
            self._read_into(target.to_local(), name, slice(*bounds[coordinate[-1]]))
        else:
            whole = self._read(name).to(target.device)
            mesh, placements = target.device_mesh, target.placements
            share = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            target.to_local().copy_(share.to_local())

    def _read_optimizer(self, optimizer: Muon) -> None:
        assert self.manifest is not None
        assert self.manifest.optimizer is not None
        facts = self.manifest.optimizer
        for name, param in symmetric_params(optimizer).items():
            if name in facts.steps:
                state = {"step": torch.tensor(float(facts.steps[name]), dtype=torch.float32)}
                for moment in MOMENTS:
                    state[moment] = torch.empty_like(param)
                    self._fill(state[moment], f"{moment}/{name}")
                optimizer.state[param] = state
        for group, saved in self._paired_groups(optimizer) or ():
            group.update(live_group(saved))
        optimizer.num_steps = facts.num_steps


def _is_expanded(value: torch.Tensor) -> bool:
    """Whether several elements are one place in memory."""
    if value.layout != torch.strided:
        return False
    return any(n > 1 and s == 0 for n, s in zip(value.shape, value.stride(), strict=True))


def _attempt(do: Callable[[], None]) -> str | None:
    try:
        do()
    except Exception as error:  # whatever it is, all ranks must hear of it
        return f"{type(error).__name__}: {error}"
    return None
