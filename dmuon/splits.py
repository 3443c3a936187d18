"""Which parameters are updated in parts: as plain data beside the optimizer's state, and compared.

The momentum is the same with and without a split, so it is loaded with any; the updates are not.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from dmuon.layout import Split
from dmuon.parameter import DedicatedParam

SplitsByName = Mapping[str, Split]


def splits_of(params: Iterable[DedicatedParam]) -> dict[str, Split]:
    """The splits that were declared, by name, their sizes written out."""
    return {p.name: p.layout.split for p in params if p.layout.split is not None}


def plain_splits(splits: SplitsByName) -> dict[str, dict[str, Any]]:
    """As plain data: ``{name: {"sizes": [...], "dim": 0}}``."""
    return {
        name: {"sizes": [split.sizes] if isinstance(split.sizes, int) else list(split.sizes)}
        | {"dim": split.dim}
        for name, split in splits.items()
    }


def read_splits(plain: Any) -> dict[str, Split]:
    """Undo `plain_splits`.

    Raises:
        ValueError: it has not made this.
    """
    if not isinstance(plain, Mapping):
        raise ValueError(f"splits: is a {type(plain).__name__}, no splits by name")
    splits: dict[str, Split] = {}
    for name, held in plain.items():
        try:
            splits[name] = Split(tuple(held["sizes"]), held["dim"])
        except (TypeError, KeyError, ValueError):
            raise ValueError(f"splits: {name!r:.100} is no split: {held!r:.100}") from None
    return splits


def other_splits(saved: SplitsByName, params: Iterable[DedicatedParam]) -> dict[str, str]:
    """Parameters that are split otherwise than in ``saved``, and how, by name."""
    different: dict[str, str] = {}
    for param in params:
        there, here = saved.get(param.name), param.layout.split
        if there != here:
            different[param.name] = f"{there or 'whole'} there, {here or 'whole'} here"
    return different


def warn_of_other_splits(what: str, different: Mapping[str, str]) -> None:
    """Say that training goes on with other updates than before."""
    if different:
        shown = "; ".join(f"{name}: {how}" for name, how in list(different.items())[:5])
        rest = f"; and {len(different) - 5} more" if len(different) > 5 else ""
        warnings.warn(
            f"{what} was written with other splits, so training goes on with other updates: "
            f"{shown}{rest}. For the same, give dedicate_params the same splits",
            stacklevel=3,
        )
