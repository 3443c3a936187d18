"""What one step's updates of hidden matrices were like, as a table and as lines of a file."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from dmuon_platform.event_facts import number, whole
from dmuon_platform.metric_names import CHANGE, ERROR_MAX, ERROR_MEAN, NORM_MAX, NORM_MIN

if TYPE_CHECKING:
    from dmuon import UpdateStatistics

UPDATES_FILE = "updates.jsonl"
"""One line a step that was looked at, written as metrics are, so that replays are compared."""

_BAND = ("band/low", "band/high")


@dataclass(frozen=True)
class UpdateRow:
    """One matrix; the numbers are those of ``dmuon.UpdateStatistics``, which says what they are."""

    rows: int
    columns: int
    spectral_norm: float
    orthogonality_error: float
    update_rms: float
    weight_rms: float

    @property
    def update_to_weight(self) -> float:
        """How much of itself the matrix changed by; infinite where all weights were zero."""
        return self.update_rms / self.weight_rms if self.weight_rms else math.inf


_FIELDS = tuple(UpdateRow.__annotations__)


@dataclass(frozen=True)
class UpdateTable:
    """One step's updates.

    Attributes:
        rows: By name of the matrix.
        band: Lowest and highest singular value that Newton-Schulz should give.
    """

    rows: Mapping[str, UpdateRow]
    band: tuple[float, float]

    @classmethod
    def of(
        cls, ranks: Iterable[Mapping[str, "UpdateStatistics"]], band: tuple[float, float]
    ) -> "UpdateTable":
        """Put together what each rank has seen of the matrices that it owns."""
        rows = {
            name: UpdateRow(
                *seen.shape,
                seen.spectral_norm,
                seen.orthogonality_error,
                seen.update_rms,
                seen.weight_rms,
            )
            for mine in ranks
            for name, seen in mine.items()
        }
        return cls({name: rows[name] for name in sorted(rows)}, band)

    def summary(self) -> dict[str, float]:
        """Return a few numbers for curves; none where no matrix was updated."""
        if not self.rows:
            return {}
        rows = self.rows.values()
        norms = [row.spectral_norm for row in rows]
        errors = [row.orthogonality_error for row in rows]
        metrics = {
            NORM_MAX: _largest(norms),
            NORM_MIN: -_largest([-norm for norm in norms]),
            ERROR_MEAN: fmean(errors),
            ERROR_MAX: _largest(errors),
        }
        changes = [each for row in rows if math.isfinite(each := row.update_to_weight)]
        if changes:
            metrics[CHANGE] = median(changes)
        return metrics

    def to_metrics(self) -> dict[str, float]:
        """Return it as one flat line: ``<matrix>/<number>``."""
        flat = dict(zip(_BAND, self.band, strict=True))
        for name, row in self.rows.items():
            flat |= {f"{name}/{field}": float(getattr(row, field)) for field in _FIELDS}
        return flat

    @classmethod
    def from_metrics(cls, flat: Mapping[str, float]) -> "UpdateTable | None":
        """Read what `to_metrics` wrote; a matrix that is not whole is left out."""
        if any(not isinstance(flat.get(key), int | float) for key in _BAND):
            return None
        found: dict[str, dict[str, float]] = {}
        for key, value in flat.items():
            name, _, field = key.rpartition("/")
            if key not in _BAND and isinstance(value, int | float):
                found.setdefault(name, {})[field] = value
        rows = dict(_rows(found))
        return cls(rows, (flat[_BAND[0]], flat[_BAND[1]]))


def _rows(found: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, UpdateRow]]:
    for name, values in found.items():
        sides = [whole(values, field) for field in _FIELDS[:2]]
        numbers = [number(values, field) for field in _FIELDS[2:]]
        if None not in (*sides, *numbers):
            yield name, UpdateRow(*sides, *numbers)  # type: ignore[arg-type]  # none is None


def _largest(values: Iterable[float]) -> float:
    """Return the largest number; NaN where one is none, which ``max`` may miss."""
    values = list(values)
    return math.nan if any(math.isnan(value) for value in values) else max(values)
