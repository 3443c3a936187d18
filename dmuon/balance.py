"""Balanced loads: which owner takes which item, by two amounts at once; pure arithmetic.

Glossary. *item*: ``(work, size)``, here Newton-Schulz operations and elements. *load* of an owner:
the larger of its work and ``SIZE_WEIGHT`` of its size, each over the mean of all owners. *bundle*:
up to two items that change hands together. *crowd*: the owners that hold equal amounts, of which
the first stands for all: with another one a choice would end the same. There are few crowds, for
models have few shapes, so 100,000 items over 16,384 owners take a fraction of a second.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import combinations_with_replacement, product
from typing import NamedTuple

SIZE_WEIGHT = 0.8  # work decides how long a step is, size only has to fit
_GOOD = 1.01  # a load that is not worth improving
_ROUNDING = 1 - 1e-9  # more than floats lose in a mean of two loads
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
Amounts = tuple[int, int]


@dataclass
class Hands:
    """What one owner holds: how many of each kind of item."""

    items: Counter[Item] = field(default_factory=Counter)
    work: int = 0
    size: int = 0

    @property
    def amounts(self) -> "Amounts":
        """Its work and its size."""
        return self.work, self.size

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


class Crowds:
    """All owners, those that hold equal amounts together.

    Attributes:
        hands: what each owner holds.
        members: the owners of each crowd by its ``(work, size)``; each list is a heap.
        scale: that makes loads of amounts.
    """

    def __init__(self, num_owners: int, scale: Scale) -> None:
        self.hands = [Hands() for _ in range(num_owners)]
        self.members: dict[Amounts, list[int]] = {(0, 0): list(range(num_owners))}
        self.scale = scale

    def deal(self, item: Item, count: int) -> None:
        """Give ``count`` times ``item``, each to the first of the owners that it loads least."""
        empty, scale = Hands(), self.scale

        def place(amounts: Amounts) -> tuple[float, int, Amounts]:
            work, size = amounts[0] + item.work, amounts[1] + item.size
            return empty.load(scale, work, size), self.members[amounts][0], amounts

        waiting = [place(amounts) for amounts in self.members]
        heapify(waiting)
        while count:
            _, owner, amounts = heappop(waiting)
            if self.members.get(amounts, (None,))[0] != owner:
                continue  # the crowd has another first, for which it waits again
            self.leave(owner)
            if amounts in self.members:
                heappush(waiting, place(amounts))
            self.hands[owner].add(item)
            self.join(owner)
            if self.members[self.hands[owner].amounts][0] == owner:
                heappush(waiting, place(self.hands[owner].amounts))
            count -= 1

    def busiest(self) -> int:
        """The first owner of the greatest load."""
        empty = Hands()
        loads = (
            (-empty.load(self.scale, *amounts), members[0])
            for amounts, members in self.members.items()
        )
        return min(loads)[1]

    def leave(self, owner: int) -> None:
        """Take ``owner``, the first of its crowd, out of it, before its amounts change."""
        amounts = self.hands[owner].amounts
        first = heappop(self.members[amounts])
        assert first == owner
        if not self.members[amounts]:
            del self.members[amounts]

    def join(self, owner: int) -> None:
        """Put ``owner`` into the crowd of its amounts."""
        heappush(self.members.setdefault(self.hands[owner].amounts, []), owner)


def distribute(items: Sequence[Item], num_owners: int) -> list[Counter[Item]]:
    """How many items of each kind every owner takes; equal on every machine.

    Longest processing time first (Graham 1969), then exchanges that lower the greatest load.
    """
    total_work = sum(item.work for item in items) or 1
    total_size = sum(item.size for item in items) or 1
    scale = (num_owners / total_work, SIZE_WEIGHT * num_owners / total_size)
    crowds = Crowds(num_owners, scale)
    kinds = Counter(items)
    for item in sorted(kinds, key=lambda item: (-Hands().load(scale, *item), item)):
        crowds.deal(item, kinds[item])
    exchanges = Exchanges(scale)
    for _ in range(4 * num_owners + 16):
        if not (_exchange(crowds, exchanges, 1) or _exchange(crowds, exchanges, 2)):
            break
    return [hands.items for hands in crowds.hands]


def _exchange(crowds: Crowds, exchanges: "Exchanges", most_items: int) -> bool:
    """Lower the greatest load by the best exchange of its owner with another, if there is one."""
    giver = crowds.busiest()
    taker, exchange = _best_partner(crowds, exchanges, giver, most_items)
    if exchange is None:
        return False
    for owner in (giver, taker):
        crowds.leave(owner)
    for item, sign in [*((i, 1) for i in exchange.given), *((i, -1) for i in exchange.returned)]:
        crowds.hands[taker].add(item, sign)
        crowds.hands[giver].add(item, -sign)
    for owner in (giver, taker):
        crowds.join(owner)
    return True


def _best_partner(
    crowds: Crowds, exchanges: "Exchanges", giver: int, most_items: int
) -> "tuple[int, Exchange | None]":
    """With whom ``giver`` makes the exchange that leaves the lowest load, and which one it is.

    Two owners cannot both come below the mean of their loads, so not all have to be asked.
    """
    gives, scale = crowds.hands[giver], crowds.scale
    best: tuple[float, int] = gives.load(scale) - 1e-9, -1  # load and partner
    exchange: Exchange | None = None
    if best[0] <= _GOOD:
        return -1, None
    means = sorted(
        (gives.load(scale, *amounts) / 2, members[0])
        for amounts, members in crowds.members.items()
        if members[0] != giver
    )
    for mean, taker in means:
        if mean * _ROUNDING > best[0]:
            break
        found = exchanges.best(gives, crowds.hands[taker], most_items)
        if found is not None and (found.load, taker) < best:
            best, exchange = (found.load, taker), found
    return best[1], exchange


class Exchange(NamedTuple):
    """Items that go one way and the other, and the greater load of the two owners then."""

    load: float
    given: tuple[Item, ...]
    returned: tuple[Item, ...]


class Exchanges:
    """The best exchange of every two hands, worked out once for all owners that hold the same."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._known: dict[object, Exchange | None] = {}

    def best(self, giver: Hands, taker: Hands, most_items: int) -> Exchange | None:
        """The one that leaves the lowest load; None where each would leave more than the giver's.

        Args:
            giver: whose load it lowers.
            taker: another owner.
            most_items: that go either way.
        """
        pair = (frozenset(giver.items.items()), frozenset(taker.items.items()), most_items)
        if pair not in self._known:
            self._known[pair] = self._find(giver, taker, most_items)
        return self._known[pair]

    def _find(self, giver: Hands, taker: Hands, most_items: int) -> Exchange | None:
        scale, best, best_load = self._scale, None, giver.load(self._scale)
        returned = [_NO_BUNDLE, *_bundles(taker, most_items)]
        for gives, returns in product(_bundles(giver, most_items), returned):
            work, size = gives.work - returns.work, gives.size - returns.size
            load = max(giver.load(scale, -work, -size), taker.load(scale, work, size))
            if load < best_load:
                best, best_load = Exchange(load, gives.items, returns.items), load
        return best


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
