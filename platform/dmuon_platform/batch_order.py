"""Which global batch a step takes, when some of them are left out."""

from collections.abc import Iterable


class BatchOrder:
    """The steps take the batches 0, 1, 2, ... in this order, without those that are left out.

    A pure function of the step and of what is left out, so nothing has to be carried along, and
    no batch comes twice. To leave more out changes nothing for the steps before it.

    Args:
        left_out: First and last batch of each window that no step may take.
    """

    def __init__(self, left_out: Iterable[tuple[int, int]] = ()) -> None:
        self._windows: list[tuple[int, int]] = []
        for first, last in sorted(left_out):
            if self._windows and first <= self._windows[-1][1] + 1:
                earlier = self._windows.pop()
                first, last = earlier[0], max(last, earlier[1])
            self._windows.append((first, last))

    def batch_of(self, step: int) -> int:
        """Return the number of the global batch that a step takes, both counted from 0."""
        number = step
        for first, last in self._windows:
            if number >= first:
                number += last - first + 1
        return number

    def without(self, first: int, last: int) -> "BatchOrder":
        """Return the order with one window more left out, its last batch included."""
        return BatchOrder([*self._windows, (first, last)])
