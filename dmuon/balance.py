"""Balanced loads: which owner takes which item, by two amounts at once; pure arithmetic.

Glossary. *item*: ``(work, size)``, here Newton-Schulz operations and elements. *load* of an owner:
the larger of its work and ``SIZE_WEIGHT`` of its size, each over the mean of all owners. *bundle*:
up to two items that change hands together.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, product
from typing import NamedTuple

SIZE_WEIGHT = 0.8  # work decides how long a step is, size only has to fit
_GOOD = 1.01  # a load that is not worth improving
_MOST_BUNDLES = (
    40  # of one owner that are tried; with more shapes the items are fine-grained anyway
)


class Item(NamedTuple):
    """What one item adds to its owner."""

    work: int
    size: int


class Bundle(NamedTuple):
    """Items that change hands together, and their sums."""

    work: int
    size: int
    items: tuple[Item, ...]


_NO_BUNDLE = Bundle(0, 0, ())

Scale = tuple[float, float]


@dataclass
class Hands:
    """What one owner holds: how many of each kind of item."""

    items: Counter[Item] = field(default_factory=Counter)
    work: int = 0
    size: int = 0

    def add(self, item: Item, count: int = 1) -> None:
        """Take ``count`` more of ``item``, or give back when negative."""
        self.items[item] += count
        if not self.items[item]:
            del self.items[item]
        self.work += count * item.work
        self.size += count * item.size

    def load(self, scale: Scale, work: int = 0, size: int = 0) -> float:
        """The load, as if ``work`` and ``size`` were held too."""
        return max((self.work + work) * scale[0], (self.size + size) * scale[1])


def distribute(items: Sequence[Item], num_owners: int) -> list[Counter[Item]]:
    """How many items of each kind every owner takes; equal on every machine.

    Longest processing time first (Graham 1969), then exchanges that lower the greatest load.
    """
    total_work = sum(item.work for item in items) or 1
    total_size = sum(item.size for item in items) or 1
    scale = (num_owners / total_work, SIZE_WEIGHT * num_owners / total_size)
    owners = [Hands() for _ in range(num_owners)]
    for item in sorted(items, key=lambda item: (-Hands().load(scale, *item), item)):
        first = min(_distinct(owners), key=lambda hands: hands.load(scale, *item))
        first.add(item)
    for _ in range(4 * num_owners + 16):
        if not (_exchange(owners, scale, 1) or _exchange(owners, scale, 2)):
            break
    return [hands.items for hands in owners]


def _distinct(owners: Iterable[Hands]) -> Iterable[Hands]:
    """One owner of each load, the first: with the others an exchange would end the same."""
    first: dict[tuple[int, int], Hands] = {}
    for hands in owners:
        first.setdefault((hands.work, hands.size), hands)
    return first.values()


def _exchange(owners: list[Hands], scale: Scale, most_items: int) -> bool:
    """Lower the greatest load by the best exchange of its owner with another, if there is one."""
    giver = max(owners, key=lambda hands: hands.load(scale))
    best, best_load = None, giver.load(scale) - 1e-9
    if best_load <= _GOOD:
        return False
    given = _bundles(giver, most_items)
    for taker in _distinct(owners):
        returned = [_NO_BUNDLE, *_bundles(taker, most_items)]
        for gives, returns in product(given, returned) if taker is not giver else ():
            work, size = gives.work - returns.work, gives.size - returns.size
            load = max(giver.load(scale, -work, -size), taker.load(scale, work, size))
            if load < best_load:
                best, best_load = (taker, gives, returns), load
    if best is None:
        return False
    taker, gives, returns = best
    for item, sign in [*((i, 1) for i in gives.items), *((i, -1) for i in returns.items)]:
        taker.add(item, sign)
        giver.add(item, -sign)
    return True


def _bundles(hands: Hands, most_items: int) -> list[Bundle]:
    """What can be taken out of ``hands`` together, spread evenly from small to large."""
    shapes = sorted(hands.items)
    picks: list[tuple[Item, ...]] = [(item,) for item in shapes]
    if most_items > 1 and len(shapes) <= _MOST_BUNDLES:
        pairs = combinations_with_replacement(shapes, 2)
        picks += [(a, b) for a, b in pairs if a != b or hands.items[a] > 1]
    bundles = sorted(
        Bundle(sum(item.work for item in pick), sum(item.size for item in pick), pick)
        for pick in picks
    )
    return bundles[:: max(1, -(-len(bundles) // _MOST_BUNDLES))]
