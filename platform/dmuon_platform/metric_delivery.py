"""Curves told to a tracker exactly once, whatever is killed or lost in between."""

from collections.abc import Callable
from typing import Protocol

from mlflow.entities import Metric

from dmuon_platform.metric_names import EVALUATION, UPDATES
from dmuon_platform.spool import Record

RARE = (EVALUATION, UPDATES)
"""Prefixes of what is not measured at every step, so that each point counts."""

MAX_RECORDS = 200
"""Steps told in one go, before it is written down how far the tracker has been told."""


class Records(Protocol):
    """What is needed of a metrics file."""

    def read_from(self, offset: int, max_records: int | None = None) -> tuple[list[Record], int]:
        """Return the records behind an offset, and the offset to go on from."""

    def size(self) -> int:
        """Return the offset behind which there is nothing now."""


class Curves(Protocol):
    """What is needed of a tracked run."""

    def log_metrics(self, metrics: list[Metric]) -> None:
        """Add points."""

    def steps_of(self, key: str) -> set[int]:
        """Return the steps at which there are points."""


class MetricDelivery:
    """Takes one metrics file to a tracker, from an offset on.

    What lies between two deliveries, the sending and the writing down of the offset, can be cut
    by a crash or a lost answer. Up to the end that the file had then, the tracker is asked what it
    has, and only the rest is sent. A step that is redone after a roll-back is one more point, or
    in doubt the same point twice: trackers show the newest.

    Args:
        records: The file.
        curves: The tracker.
        offset: Up to where it was told for certain.
        told: Called with each new offset, to write it down.
        log_every: Steps between two points; what is measured now and then is always told.
    """

    def __init__(
        self,
        records: Records,
        curves: Curves,
        offset: int,
        told: Callable[[int], None],
        log_every: int = 1,
    ) -> None:
        self._records = records
        self._curves = curves
        self._offset = offset
        self._told = told
        self._log_every = log_every
        self._doubtful_until = records.size()
        self._there: dict[str, set[int]] = {}
        self._last: dict[str, int] = {}

    def deliver(self) -> None:
        """Tell everything that is in the file now."""
        while True:
            records, end = self._records.read_from(self._offset, MAX_RECORDS)
            if end == self._offset:
                return
            try:
                points = self._new(records)
                self._curves.log_metrics(points)
            except BaseException:
                self._doubtful_until = max(self._doubtful_until, end)
                self._there.clear()
                raise
            for point in points:
                self._last[point.key] = max(point.step, self._last.get(point.key, point.step))
                if point.key in self._there:
                    self._there[point.key].add(point.step)
            self._offset = end
            self._told(end)

    def _new(self, records: list[Record]) -> list[Metric]:
        metrics: dict[tuple[str, int], Metric] = {}
        for record in records:
            for key, value in self._chosen(record).items():
                # A step that is not behind the last one: two attempts wrote at the same time.
                in_doubt = self._offset < self._doubtful_until or record.step <= self._last.get(
                    key, record.step - 1
                )
                point = Metric(key, value, int(record.time * 1000), record.step)
                if record.is_redone:  # the tracker may have the earlier one, and takes the newest
                    metrics[key, record.step] = point
                elif not (in_doubt and record.step in self._steps_there(key)):
                    metrics.setdefault((key, record.step), point)
        return list(metrics.values())

    def _chosen(self, record: Record) -> dict[str, float]:
        if record.step % self._log_every == 0:
            return record.metrics
        return {k: v for k, v in record.metrics.items() if k.startswith(RARE)}

    def _steps_there(self, key: str) -> set[int]:
        if key not in self._there:
            self._there[key] = self._curves.steps_of(key)
        return self._there[key]
