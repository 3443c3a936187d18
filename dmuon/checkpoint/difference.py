"""What differs between two checkpoints, tensor by tensor. Local; a chunk of one at a time."""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmuon.checkpoint.export import row_chunks
from dmuon.checkpoint.facts import TensorFacts
from dmuon.checkpoint.manifest import Manifest
from dmuon.checkpoint.plain_json import encode
from dmuon.checkpoint.source import CheckpointSource, Source, open_source
from dmuon.checkpoint.tensor_file import TensorReader
from dmuon.splits import plain_splits

_CHUNK_VALUES = 4 * 2**20  # each becomes 8 bytes, or 16 when complex
ABSENT = "(absent)"
"""Stands for a setting that only the other has."""


@dataclass(frozen=True)
class ValueDifference:
    """One tensor whose values differ.

    Attributes:
        name: of the tensor.
        num_different: values that differ; NaN is equal to NaN.
        num_values: that it has.
        largest_absolute: of ``|a - b|``; infinite where only one of the two is NaN.
        largest_relative: of ``|a - b| / max(|a|, |b|)``, which is at most 2; infinite likewise.
    """

    name: str
    num_different: int
    num_values: int
    largest_absolute: float
    largest_relative: float


@dataclass(frozen=True)
class CheckpointDifference:
    """What differs between ``a`` and ``b``.

    Attributes:
        a: path of the first.
        b: path of the second.
        only_in_a: names of tensors, sorted.
        only_in_b: names of tensors, sorted.
        other_kind: type and shape in each, where they differ, by name.
        values: tensors whose values differ, by name.
        settings: step, optimizer settings, what is tied, plain state of modules and the caller's
            data, by path, with the value in each.
        num_compared: tensors that are in both with one type and shape.
        weights_only: one of them is no checkpoint of ours, so nothing but weights was compared.
    """

    a: Path
    b: Path
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    other_kind: Mapping[str, tuple[TensorFacts, TensorFacts]]
    values: tuple[ValueDifference, ...]
    settings: Mapping[str, tuple[Any, Any]]
    num_compared: int
    weights_only: bool

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return not (
            self.only_in_a or self.only_in_b or self.other_kind or self.values or self.settings
        )


def diff_checkpoints(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> CheckpointDifference:
    """Compare two checkpoints value by value.

    How they were written does not matter: not their files, mesh, time or versions, nor under which
    of its names a tied weight is.

    Args:
        a: a checkpoint, or any other weights: a Hugging Face folder, a ``.safetensors`` file, or a
            file of ``torch.save``. When either is no checkpoint of ours, weights are compared and
            nothing else.
        b: the other.

    Raises:
        CheckpointError: one of them cannot be read. Hashes are not compared, see
            ``verify_checkpoint``.
    """
    ours, theirs = open_source(a), open_source(b)
    manifests = _manifest(ours), _manifest(theirs)
    weights_only = None in manifests
    in_a = _names(ours, theirs, weights_only)
    in_b = _names(theirs, ours, weights_only)
    weights = {*ours.names, *theirs.names}  # what a model computes with comes first
    common = sorted(in_a & in_b, key=lambda name: (name not in weights, name))
    facts = {
        name: (_holder(ours, name).facts(name), _holder(theirs, name).facts(name))
        for name in common
    }
    alike = [name for name in common if facts[name][0] == facts[name][1]]
    found = (_compare(name, ours, theirs, facts[name][0]) for name in alike)
    return CheckpointDifference(
        a=ours.path,
        b=theirs.path,
        only_in_a=tuple(sorted(in_a - in_b)),
        only_in_b=tuple(sorted(in_b - in_a)),
        other_kind={name: each for name, each in facts.items() if each[0] != each[1]},
        values=tuple(each for each in found if each is not None),
        settings=_differing_settings(*manifests),
        num_compared=len(alike),
        weights_only=weights_only,
    )


def _manifest(source: Source) -> Manifest | None:
    return source.manifest if isinstance(source, CheckpointSource) else None


def _groups(source: Source) -> dict[str, list[str]]:
    """Every name of each weight, by the one it is stored under."""
    manifest = _manifest(source)
    tied = {} if manifest is None else manifest.tied
    groups = {name: [name] for name in source.names if name not in tied}
    for alias, kept in tied.items():
        groups[kept].append(alias)
    return groups


def _names(source: Source, other: Source, weights_only: bool) -> set[str]:
    """What to compare: a tied weight under the names that the other has too."""
    others = set(other.names)
    names: set[str] = set()
    for kept, group in _groups(source).items():
        names |= set(group) & others or {kept}
    if not weights_only:
        assert isinstance(source, CheckpointSource)
        names |= set(source.reader.names) - set(source.names)
    return names


def _holder(source: Source, name: str) -> Source | TensorReader:
    """What has the tensor: a source has weights alone, but by each of their names."""
    if isinstance(source, CheckpointSource) and name in source.reader:
        return source.reader
    return source


def _facts(source: Source, name: str) -> TensorFacts:
    return _holder(source, name).facts(name)


def _compare(name: str, a: Source, b: Source, facts: TensorFacts) -> ValueDifference | None:
    num_different = 0
    absolute = relative = 0.0
    for rows in row_chunks(facts, _CHUNK_VALUES * facts.itemsize):
        x, y = (_holder(source, name).read(name, rows) for source in (a, b))
        differs = _differs(x, y)
        count = int(differs.sum())
        if count == 0:
            continue
        num_different += count
        x, y = (_exact(each)[differs] for each in (x, y))
        delta = (x - y).abs()
        delta[delta == 0] = 1  # integers beyond what float64 tells apart
        ratio = delta / torch.maximum(x.abs(), y.abs())
        absolute, relative = max(absolute, _largest(delta)), max(relative, _largest(ratio))
    if num_different == 0:
        return None
    return ValueDifference(name, num_different, math.prod(facts.shape), absolute, relative)


_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _differs(x: Tensor, y: Tensor) -> Tensor:
    if not (x.is_floating_point() or x.is_complex()):
        signed = _SIGNED[x.itemsize]  # torch compares few of the unsigned types
        return x.view(signed) != y.view(signed)
    x, y = _exact(x), _exact(y)
    return (x != y) & ~(x.isnan() & y.isnan())


def _exact(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def _largest(values: Tensor) -> float:
    return float(values.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _differing_settings(a: Manifest | None, b: Manifest | None) -> dict[str, tuple[Any, Any]]:
    if a is None or b is None:
        return {}
    ours, theirs = _settings(a), _settings(b)
    pairs = {
        path: (ours.get(path, ABSENT), theirs.get(path, ABSENT))
        for path in sorted(ours.keys() | theirs.keys())
    }
    return {path: pair for path, pair in pairs.items() if encode(pair[0]) != encode(pair[1])}


def _settings(manifest: Manifest) -> dict[str, Any]:
    """Everything that is not a tensor, and not about how the checkpoint was written, by path."""
    groups: dict[str, list[str]] = {}
    for alias, kept in manifest.tied.items():
        groups.setdefault(kept, [kept]).append(alias)
    optimizer: Any = manifest.optimizer
    if optimizer is not None:
        optimizer = {
            "param_groups": optimizer.param_groups,
            "num_steps": optimizer.num_steps,
            "steps": optimizer.steps,
        } | ({"splits": plain_splits(optimizer.splits)} if optimizer.splits else {})
    everything = {
        "step": manifest.step,
        "tied": sorted(sorted(group) for group in groups.values()),
        "optimizer": optimizer,
        "module_state": manifest.module_state,
        "extra": manifest.extra,
    }
    return dict(_flat("", everything))


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts, and of lists of dicts; other lists stay whole."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        for index, inner in enumerate(value):
            yield from _flat(f"{path}[{index}]", inner)
    else:
        yield path, value
