"""What a checkpoint of a model and its optimizer holds, and which rank has it.

Local and equal on all ranks: names, shapes and kinds alone, no values.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dmuon.checkpoint.assignment import Section
from dmuon.checkpoint.facts import TensorFacts, facts_of
from dmuon.dedication import Dedication
from dmuon.errors import OwnershipError
from dmuon.model_state import check_names, live_values
from dmuon.names import is_extra_state
from dmuon.optimizer import Muon
from dmuon.optimizer_state import MOMENTS, symmetric_params
from dmuon.parameter import DedicatedParam
from dmuon.parcel import MASTER_DTYPE, Parcel

MODEL: Section = "model"
OPTIM: Section = "optim"


@dataclass(frozen=True, eq=False)
class Entry:
    """One tensor of a checkpoint.

    Attributes:
        section: ``"model"`` or ``"optim"``.
        name: in its file.
        shape: of the whole tensor.
        dtype: in the file.
    """

    section: Section
    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def key(self) -> str:
        """Unique in the checkpoint."""
        return f"{self.section} {self.name}"

    @property
    def facts(self) -> TensorFacts:
        """What the manifest says about it."""
        return facts_of(torch.empty(self.shape, dtype=self.dtype, device="meta"))

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class OwnedEntry(Entry):
    """A tensor that one owner holds whole.

    Attributes:
        parcel: where its weights are.
        param: whose it is.
        kind: ``"weight"``, ``"master_weight"`` or ``"momentum_buffer"``.
    """

    parcel: Parcel
    param: DedicatedParam
    kind: str


@dataclass(frozen=True, eq=False)
class ShardedEntry(Entry):
    """A tensor in shards over the ranks of a row, the same in every row."""

    value: DTensor


@dataclass(frozen=True, eq=False)
class PlainEntry(Entry):
    """A tensor that every rank has whole, such as a buffer; that of the first rank counts."""

    value: torch.Tensor


@dataclass(frozen=True, eq=False)
class ModuleEntry(PlainEntry):
    """A tensor that ``get_extra_state`` of a module returns; ``set_extra_state`` takes it back."""


@dataclass
class Content:
    """All of it.

    Attributes:
        entries: in the order of the model, then of the optimizer.
        tied: weights that are kept once: the other name, and the one that is kept.
        module_state: what ``get_extra_state`` of modules returns, when it is no tensor.
        steps: AdamW's step counters by parameter.
    """

    entries: list[Entry] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    module_state: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)


def content_of(
    dedication: Dedication, optimizer: Muon | None, have_momentum: frozenset[str]
) -> Content:
    """What a checkpoint of this model and optimizer holds. Local; equal on all ranks.

    Args:
        dedication: of the model.
        optimizer: its ``dmuon.Muon``; None for a checkpoint of weights alone.
        have_momentum: names of the dedicated parameters that have been updated.
    """
    content = Content()
    owned = {param.name: (parcel, param) for parcel, param in _owned(dedication)}
    _add_model(content, dedication, owned)
    if optimizer is not None:
        for name, (parcel, param) in owned.items():
            kinds = ["momentum_buffer"] if name in have_momentum else []
            kinds += ["master_weight"] if param.dtype != MASTER_DTYPE else []
            for kind in kinds:
                named = f"{kind}/{name}"
                content.entries.append(
                    OwnedEntry(OPTIM, named, param.shape, MASTER_DTYPE, parcel, param, kind)
                )
        for name, symmetric in symmetric_params(optimizer).items():
            _add_moments(content, name, optimizer.state.get(symmetric) or {})
    return content


def _owned(dedication: Dedication) -> Iterator[tuple[Parcel, DedicatedParam]]:
    for block in dedication.engine.blocks:
        for parcel in block.parcels:
            for param in parcel.params:
                yield parcel, param


def _add_model(
    content: Content,
    dedication: Dedication,
    owned: dict[str, tuple[Parcel, DedicatedParam]],
) -> None:
    canonical = {
        name: param.name for param in dedication.params for name in (param.name, *param.aliases)
    }
    kept: dict[torch.Tensor, str] = {}
    walk = live_values(dedication)
    check_names(dedication, {name for name, _ in walk})
    for name, value in walk:
        if name in canonical:
            first = canonical[name]
            if first != name:
                content.tied[name] = first
            else:
                parcel, param = owned[name]
                content.entries.append(
                    OwnedEntry(MODEL, name, param.shape, param.dtype, parcel, param, "weight")
                )
        elif is_extra_state(name):
            _add_module_state(content, name, value)
        elif not isinstance(value, torch.Tensor):
            raise OwnershipError(
                f"a state_dict hook of this model adds {name}, a {type(value).__name__}, which no "
                "checkpoint keeps; return it from get_extra_state of its module instead"
            )
        elif isinstance(value, nn.Parameter) and value in kept:
            content.tied[name] = kept[value]
        else:
            kept[value] = name
            content.entries.append(_entry(MODEL, name, value))


def _add_module_state(content: Content, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        entry = ModuleEntry(MODEL, name, value.shape, value.dtype, value.detach())
        content.entries.append(entry)
    else:
        content.module_state[name] = value


def _add_moments(content: Content, name: str, state: dict[str, Any]) -> None:
    if not state:
        return
    for moment in MOMENTS:
        content.entries.append(_entry(OPTIM, f"{moment}/{name}", state[moment]))
    content.steps[name] = float(state["step"])


def _entry(section: Section, name: str, value: torch.Tensor) -> Entry:
    if isinstance(value, DTensor):
        # not detached: that would have a shard whose changes are counted apart
        return ShardedEntry(section, name, value.shape, value.dtype, value)
    return PlainEntry(section, name, value.shape, value.dtype, value.detach())
