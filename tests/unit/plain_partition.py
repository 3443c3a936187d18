"""The plan by looking at every owner for every matrix: what the fast one must agree with."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

from dmuon import Matrix
from dmuon.balance import _GOOD, _NO_BUNDLE, SIZE_WEIGHT, Bundle, Hands, Item, Scale, _bundles


def plain_owners(matrices: Sequence[Matrix], num_owners: int) -> list[int]:
    items = [Item(matrix.cost, matrix.numel) for matrix in matrices]
    free: dict[Item, Counter[int]] = {item: Counter() for item in items}
    for owner, hands in enumerate(plain_hands(items, num_owners)):
        for item, count in hands.items():
            free[item][owner] = count
    in_block: Counter[tuple[str, int]] = Counter()
    owners = []
    for matrix, item in zip(matrices, items, strict=True):
        left, block = +free[item], matrix.block
        owner = min(left, key=lambda o: (in_block[block, o], -left[o], o))
        in_block[block, owner] += matrix.numel
        free[item][owner] -= 1
        owners.append(owner)
    return owners


def plain_hands(items: Sequence[Item], num_owners: int) -> list[Counter[Item]]:
    work, size = (sum(amounts) for amounts in zip(*items, strict=True))
    scale = (num_owners / work, SIZE_WEIGHT * num_owners / size)
    owners = [Hands() for _ in range(num_owners)]
    for item in sorted(items, key=lambda item: (-Hands().load(scale, *item), item)):
        min(owners, key=lambda hands: hands.load(scale, *item)).add(item)
    for _ in range(4 * num_owners + 16):
        if not (exchange(owners, scale, 1) or exchange(owners, scale, 2)):
            break
    return [hands.items for hands in owners]


def exchange(owners: list[Hands], scale: Scale, most_items: int) -> bool:
    giver = max(owners, key=lambda hands: hands.load(scale))
    best, best_load = None, giver.load(scale) - 1e-9
    if best_load <= _GOOD:
        return False
    for taker, gives, returns in candidates(owners, giver, most_items):
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


def candidates(
    owners: list[Hands], giver: Hands, most_items: int
) -> Iterator[tuple[Hands, Bundle, Bundle]]:
    first: dict[tuple[int, int], Hands] = {}  # of those that hold equal amounts
    for hands in owners:
        first.setdefault((hands.work, hands.size), hands)
    for taker in first.values():
        if taker is not giver:
            pairs = product(_bundles(giver, most_items), [_NO_BUNDLE, *_bundles(taker, most_items)])
            yield from ((taker, *pair) for pair in pairs)
