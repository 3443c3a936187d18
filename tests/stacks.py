"""Orthogonalising tensors as they are, the way ``dmuon.Muon`` does it with its updates."""

from collections.abc import Sequence

import torch

from dmuon.batching import Workspace, orthogonalize_all
from dmuon.newton_schulz import (
    POLAR_EXPRESS_COEFFICIENTS,
    coefficient_schedule,
    default_dtype,
)


class Copies:
    """A stack that is read from one tensor and whose results go to another."""

    def __init__(self, source: torch.Tensor, result: torch.Tensor) -> None:
        self.source, self.result, self.shape = source, result, source.shape

    def split_at(self, count: int) -> tuple["Copies", "Copies"]:
        first = Copies(self.source[:count], self.result[:count])
        return first, Copies(self.source[count:], self.result[count:])

    def write_to(self, room_BMN: torch.Tensor) -> None:
        room_BMN.copy_(self.source)

    def take(self, orthogonal_BMN: torch.Tensor) -> None:
        self.result.copy_(orthogonal_BMN)


def orthogonalized(
    sources: Sequence[torch.Tensor],
    dtype: torch.dtype | None = None,
    workspace: Workspace | None = None,
) -> list[torch.Tensor]:
    """For each ``(B, M, N)`` a new one, by five Polar Express steps."""
    device = sources[0].device if sources else torch.device("cpu")
    dtype = dtype or default_dtype(device)
    results = [torch.full(s.shape, torch.nan, dtype=dtype, device=device) for s in sources]
    orthogonalize_all(
        [Copies(*each) for each in zip(sources, results, strict=True)],
        workspace or Workspace(device),
        coefficient_schedule(POLAR_EXPRESS_COEFFICIENTS, 5),
        dtype=dtype,
        eps=1e-7,
    )
    return results
