"""Which of equal items goes to whom, once it is known how many everybody takes."""

from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from dmuon.balance import Item

Place = tuple[int, int, int]  # what the owner has of the block, -(how many it may take), the owner


class Queue:
    """The owners that still take items of one kind, those first that hold least of the block.

    What an owner holds of a block only grows, and what it may take shrinks, so its true place is at
    or behind the one where it waits: that is looked up when its turn comes.

    Attributes:
        free: how many each owner may still take.
    """

    def __init__(self, free: Counter[int]) -> None:
        self.free = free
        self._waiting: list[Place] = [(0, -count, owner) for owner, count in free.items()]
        self._place_of: dict[int, Place] = {place[2]: place for place in self._waiting}
        heapify(self._waiting)

    def take(self, in_block: Counter[int], size: int) -> int:
        """The owner that holds least of the block, may take most, and is first; it takes one.

        Args:
            in_block: what each owner holds of the block; the owner gets ``size`` more.
            size: of the item.
        """
        while True:
            place = heappop(self._waiting)
            owner = place[2]
            if self._place_of.get(owner) != place:
                continue  # it waits elsewhere now
            true_place = (in_block[owner], -self.free[owner], owner)
            if place == true_place:
                break
            self._wait(true_place)
        in_block[owner] += size
        self.free[owner] -= 1
        if self.free[owner]:
            self._wait((in_block[owner], -self.free[owner], owner))
        else:
            del self.free[owner], self._place_of[owner]
        return owner

    def come_forward(self, owner: int) -> None:
        """For another block, of which ``owner`` may hold nothing, wait in front."""
        if owner in self._place_of:
            place = (0, -self.free[owner], owner)
            if place < self._place_of[owner]:
                self._wait(place)

    def _wait(self, place: Place) -> None:
        self._place_of[place[2]] = place
        heappush(self._waiting, place)


def place(
    items: Sequence[Item], blocks: Sequence[str], hands: Sequence[Counter[Item]]
) -> list[int]:
    """The owner of every item.

    Args:
        items: in order.
        blocks: the block of each; items of one block go to owners that hold least of it.
        hands: how many of each kind every owner takes.
    """
    free: dict[Item, Counter[int]] = {}
    for owner, counts in enumerate(hands):
        for item, count in counts.items():
            free.setdefault(item, Counter())[owner] = count
    queues = {item: Queue(counts) for item, counts in free.items()}
    held: dict[str, Counter[int]] = {}
    owners: list[int] = []
    block, in_block = "", held.setdefault("", Counter())
    for item, block_of_item in zip(items, blocks, strict=True):
        if block_of_item != block:
            for owner in in_block:
                for item_of_hand in hands[owner]:
                    queues[item_of_hand].come_forward(owner)
            block, in_block = block_of_item, held.setdefault(block_of_item, Counter())
        owners.append(queues[item].take(in_block, item.size))
    return owners
