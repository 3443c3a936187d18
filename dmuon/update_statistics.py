"""Whether the updates of hidden matrices are what Muon means them to be: orthogonal.

Measured where an update is used, on its owner and on nothing but what lies there: no collective,
no random number of the training, and nothing that is written to.

Letters: ``B x M x N`` matrices of one shape, ``m = min(M, N)``.
"""

import math
from dataclasses import dataclass

import torch

from dmuon.layout import Layout
from dmuon.newton_schulz import POLAR_EXPRESS_COEFFICIENTS, Coefficients, coefficient_schedule

# Up to this side all eigenvalues of O O^T are computed, a few milliseconds on a core. Beyond, the
# largest is found by power iteration from a few starts, which costs less than one product O O^T.
EXACT_SIDE = 256
_STARTS = 8
_ITERATIONS = 64

SMALLEST_SINGULAR_VALUE = 1e-3
"""Relative to the Frobenius norm: from there on Polar Express is made for (arXiv 2505.16932)."""


@dataclass(frozen=True)
class UpdateStatistics:
    """One update of one matrix ``W``, ``W <- (1 - lr wd) W - rate O``; ``rate`` is ``lr s``.

    Exact orthogonalisation gives ``O`` singular values of 1. Newton-Schulz gives those that
    `singular_value_band` tells: 0.85 to 1.12 with the default coefficients and 5 steps, 0.47 to
    1.20 with the classic ones (Jordan et al. 2024, "Muon", says 0.5 to 1.5), a few percent more in
    bfloat16. A direction in which the gradient has next to nothing gets next to no update.

    Attributes:
        shape: ``(M, N)``.
        spectral_norm: largest singular value of ``O``. Exact up to ``m = 256``, beyond it a lower
            bound, in practice within 1 %.
        orthogonality_error: ``||O O^T - I||_F / sqrt(m)``, or ``||O^T O - I||_F / sqrt(m)`` of a
            matrix that stands: the root mean square of ``sigma^2 - 1`` over its ``m`` singular
            values. 0 is orthogonal; where a part ``f`` of the directions gets no update and the
            others a whole one, it is ``sqrt(f)``; 1 is no update.
        update_rms: root mean square of the entries of ``rate O``.
        weight_rms: of those of ``W``, before the update.
    """

    shape: tuple[int, int]
    spectral_norm: float
    orthogonality_error: float
    update_rms: float
    weight_rms: float

    @property
    def update_to_weight(self) -> float:
        """``update_rms / weight_rms``; infinite where all weights are zero."""
        return self.update_rms / self.weight_rms if self.weight_rms else math.inf


class UpdateWatch:
    """Collects what the updates of one step look like; see ``dmuon.watch_updates``."""

    def __init__(self) -> None:
        self._measured: dict[str, tuple[tuple[int, int], torch.Tensor]] = {}

    def of(self, name: str, layout: Layout) -> "ParamWatch":
        """The watch over one parameter."""
        return ParamWatch(self, name, layout)

    def note(self, name: str, shape: tuple[int, int], measures_4: torch.Tensor) -> None:
        """Keep what was measured of one matrix; on the device until somebody asks."""
        self._measured[name] = shape, measures_4

    def result(self) -> dict[str, UpdateStatistics]:
        """What was measured, by name of the matrix. Waits for the device once."""
        if not self._measured:
            return {}
        shapes, measures = zip(*self._measured.values(), strict=True)
        rows = torch.stack(measures).tolist()
        return {
            name: UpdateStatistics(shape, *row)
            for name, shape, row in zip(self._measured, shapes, rows, strict=True)
        }


@dataclass(frozen=True)
class ParamWatch:
    """The part of a watch that is about one parameter."""

    watch: UpdateWatch
    name: str
    layout: Layout

    def see(
        self, part: int, first: int, weights: torch.Tensor, orthogonal: torch.Tensor, rate: float
    ) -> None:
        """Measure some matrices of one part, before their update; ``(B, m, n)`` both.

        Args:
            part: which of the layout's.
            first: the number of the first of them in the stack.
            weights: as they are.
            orthogonal: what is subtracted ``rate`` times.
            rate: ``lr s``.
        """
        _, M, N = orthogonal.shape
        for index, row in enumerate(measure(weights, orthogonal, rate), start=first):
            self.watch.note(self._name_of(part, index), (M, N), row)

    def _name_of(self, part: int, index: int) -> str:
        parts = self.layout.parts
        stack = f"[{index}]" if parts[part][0] > 1 else ""
        return f"{self.name}{stack}" + (f":{part}" if len(parts) > 1 else "")


@torch.no_grad()
def measure(weights_BMN: torch.Tensor, orthogonal_BMN: torch.Tensor, rate: float) -> torch.Tensor:
    """Spectral norm, orthogonality error, RMS of update and of weight: ``(B, 4)``, float32.

    Neither tensor is changed. Numbers that are not finite give NaN.
    """
    X = orthogonal_BMN.to(torch.float32)
    numel = X[0].numel()
    if X.size(-2) > X.size(-1):
        X = X.mT
    gram = X @ X.mT
    m = gram.size(-1)
    off = gram - torch.eye(m, dtype=gram.dtype, device=gram.device)
    norm = torch.linalg.vector_norm
    columns = [
        _largest_eigenvalue(gram).clamp(min=0).sqrt(),
        norm(off, dim=(-2, -1)) / math.sqrt(m),
        norm(X, dim=(-2, -1)) * abs(rate) / math.sqrt(numel),
        norm(weights_BMN, dim=(-2, -1), dtype=torch.float32) / math.sqrt(numel),
    ]
    return torch.stack(columns, dim=-1)


def _largest_eigenvalue(gram_Bmm: torch.Tensor) -> torch.Tensor:
    """Of symmetric matrices that are nowhere negative; NaN where one is not finite."""
    m = gram_Bmm.size(-1)
    if m <= EXACT_SIDE:
        is_finite = gram_Bmm.isfinite().all(-1).all(-1)
        # what is not finite would be an error
        values = torch.linalg.eigvalsh(gram_Bmm.where(is_finite[:, None, None], 0.0))[:, -1]
        return values.where(is_finite, math.nan)
    generator = torch.Generator().manual_seed(0)  # the training's own is left alone
    starts = torch.randn(m, _STARTS, generator=generator, dtype=gram_Bmm.dtype)
    V = starts.to(gram_Bmm.device).expand(len(gram_Bmm), -1, -1)
    least = torch.finfo(gram_Bmm.dtype).tiny
    for _ in range(_ITERATIONS):
        V = V / torch.linalg.vector_norm(V, dim=-2, keepdim=True).clamp(min=least)
        V = gram_Bmm @ V
    return torch.linalg.vector_norm(V, dim=-2).amax(-1)


def singular_value_band(
    coefficients: Coefficients = POLAR_EXPRESS_COEFFICIENTS,
    steps: int = 5,
    smallest: float = SMALLEST_SINGULAR_VALUE,
) -> tuple[float, float]:
    """Between which values Newton-Schulz brings singular values, in exact arithmetic.

    Computed from the polynomial itself, for all singular values that are between ``smallest`` and
    1 when the matrix was divided by its Frobenius norm.

    Args:
        coefficients: as `newton_schulz` takes them.
        steps: number of iterations.
        smallest: below it, a direction need not get a whole update.
    """
    x = torch.logspace(math.log10(smallest), 0.0, 20_001, dtype=torch.float64)
    for a, b, c in coefficient_schedule(coefficients, steps):
        x = a * x + b * x**3 + c * x**5
    return float(x.min()), float(x.max())
