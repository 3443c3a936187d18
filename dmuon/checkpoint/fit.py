"""What of a source goes where in a model and its optimizer, and what does not fit.

Nothing here changes anything, and nothing communicates.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from dmuon.checkpoint.content import (
    MODEL,
    Entry,
    ModuleEntry,
    OwnedEntry,
    PlainEntry,
    ShardedEntry,
    content_of,
)
from dmuon.checkpoint.facts import TensorFacts
from dmuon.checkpoint.manifest import Manifest, OptimizerFacts
from dmuon.checkpoint.source import CheckpointSource, Source
from dmuon.checkpoint.tensor_file import TensorReader
from dmuon.dedication import Dedication
from dmuon.groups import Group, pair_groups
from dmuon.optimizer import Muon
from dmuon.optimizer_state import MOMENTS, symmetric_params


def manifest_of(source: Source) -> Manifest | None:
    """The manifest of a checkpoint of ours; None for other weights."""
    return source.manifest if isinstance(source, CheckpointSource) else None


def _trained(manifest: Manifest | None) -> frozenset[str]:
    """Names of the dedicated parameters whose momentum is in the checkpoint."""
    if manifest is None:
        return frozenset()
    names = [name for tensors in manifest.tensors.values() for name in tensors]
    prefix = "momentum_buffer/"
    return frozenset(name.removeprefix(prefix) for name in names if name.startswith(prefix))


class Fit:
    """A source beside a model and its optimizer.

    Attributes:
        manifest: of the source, if it is a checkpoint of ours.
        content: what is needed of it.

    Args:
        dedication: of the model.
        optimizer: its ``dmuon.Muon``; None for weights alone.
        source: what is loaded.
        converts: weights may have another dtype than the model's.
    """

    def __init__(
        self, dedication: Dedication, optimizer: Muon | None, source: Source, converts: bool
    ) -> None:
        self.dedication = dedication
        self.optimizer = optimizer
        self.source = source
        self.manifest = manifest_of(source)
        self._converts = converts
        self.content = content_of(dedication, optimizer, _trained(self.manifest))
        # the optimizer's present state says nothing about the one that is loaded
        self.content.entries = [
            entry
            for entry in self.content.entries
            if entry.section == MODEL
            or (isinstance(entry, OwnedEntry) and entry.kind == "momentum_buffer")
        ]

    @property
    def optimizer_facts(self) -> OptimizerFacts | None:
        """What the source tells of an optimizer; None without one."""
        return None if self.manifest is None else self.manifest.optimizer

    def other_names(self) -> tuple[list[str], list[str]]:
        """Weights, and what modules keep, that are missing, and that are not expected."""
        weights = [entry for entry in self.content.entries if entry.section == MODEL]
        wanted = [e.name for e in weights if not isinstance(e, ModuleEntry)]
        there = {e.name for e in weights if self.name_of(e) is not None}
        missing = [name for name in wanted if name not in there]
        missing += [name for name in self.module_names if name not in self._kept_names]
        known = {*wanted, *self.module_names, *self.content.tied}
        unexpected = [name for name in sorted(self._kept_names) if name not in known]
        return missing, unexpected

    def misfits(self) -> list[str]:
        """What does not fit, a line each."""
        problems = [line for entry in self.content.entries for line in self._misfit(entry)]
        if self.optimizer is not None:
            problems += self._optimizer_misfits(self.optimizer)
        return problems

    def name_of(self, entry: Entry) -> str | None:
        """Under which name the source holds it: its own, or for a weight one that is tied to it."""
        if entry.section != MODEL:
            return entry.name
        aliases = [alias for alias, kept in self.content.tied.items() if kept == entry.name]
        return next((n for n in (entry.name, *aliases) if n in self.weights), None)

    def holder(self, name: str) -> Source | TensorReader:
        """Where a tensor is read: among the weights, or the optimizer's state."""
        if isinstance(self.source, CheckpointSource) and name not in self.weights:
            return self.source.reader
        return self.source

    def read_into(self, target: torch.Tensor, name: str, rows: slice | None = None) -> None:
        """Read a tensor, or some of its rows, to where it belongs. See `Source.read_into`."""
        self.holder(name).read_into(target, name, rows)

    def has_master(self, name: str) -> bool:
        """Whether the float32 values of a weight are kept apart from it."""
        return self.optimizer is not None and f"master_weight/{name}" in self._state_names

    def paired_groups(self, optimizer: Muon) -> list[tuple[Group, Mapping[str, Any]]] | None:
        """Groups of the optimizer beside the saved ones; None when they are not alike."""
        assert self.optimizer_facts is not None
        saved = self.optimizer_facts.param_groups
        return pair_groups(optimizer.param_groups, saved, self.dedication.model)

    @cached_property
    def module_names(self) -> list[str]:
        """Of what modules of this model keep beside their tensors."""
        tensors = [e.name for e in self.content.entries if isinstance(e, ModuleEntry)]
        return [*tensors, *self.content.module_state]

    @cached_property
    def _kept_names(self) -> frozenset[str]:
        """Of all weights in the source, and of what modules kept beside them."""
        return self.weights.union(self.source.module_state)

    @cached_property
    def weights(self) -> frozenset[str]:
        """Names of the weights in the source."""
        return frozenset(self.source.names)

    @cached_property
    def _state_names(self) -> frozenset[str]:
        if self.manifest is None:
            return frozenset()
        names = {name for tensors in self.manifest.tensors.values() for name in tensors}
        return frozenset(names - self.weights)

    def _misfit(self, entry: Entry) -> list[str]:
        name = self.name_of(entry)
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
        if facts.torch_dtype != entry.dtype and entry.section == MODEL and not self._converts:
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
        facts = self.optimizer_facts
        if facts is None:
            return ["it holds no state of an optimizer; load it without one, for weights alone"]
        if self.paired_groups(optimizer) is None:
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
            if self.has_master(owned.name):
                problems += self._state_misfit(f"master_weight/{owned.name}", owned.shape)
        return problems

    def _state_misfit(self, name: str, shape: torch.Size) -> list[str]:
        if name not in self._state_names:
            return [f"{name}: missing from the optimizer's state"]
        found = self._facts(name).shape
        return [] if found == tuple(shape) else [f"{name}: has shape {found}, needs {tuple(shape)}"]

    def _facts(self, name: str) -> TensorFacts:
        return self.holder(name).facts(name)


def _is_expanded(value: torch.Tensor) -> bool:
    """Whether several elements are one place in memory."""
    if value.layout != torch.strided:
        return False
    return any(n > 1 and s == 0 for n, s in zip(value.shape, value.stride(), strict=True))
