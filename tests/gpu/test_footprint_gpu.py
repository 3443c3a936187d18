"""Memory of one contender of the benchmark, beside others."""

import pytest
import torch

from dmuon.bench.footprint import DeviceFootprint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 2**20


def test_what_others_hold_does_not_count_and_what_was_held_before_does() -> None:
    def allocate(mib: int) -> torch.Tensor:
        return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

    device = torch.device("cuda", 0)
    ours, theirs = DeviceFootprint(device), DeviceFootprint(device)
    with ours.building():
        weights = allocate(10)
    with theirs.building():
        other = allocate(500)
    with ours.turn(is_timed=False):
        moments = allocate(20)  # stays
        allocate(40)
    with theirs.turn(is_timed=False):
        allocate(100)
    with ours.turn(is_timed=False):
        allocate(50)
    # the allocator may hand out blocks that are somewhat larger
    assert ours.peak == pytest.approx(80 * MIB, abs=4 * MIB)  # 10 and 20 that stay, then 50
    assert theirs.peak == pytest.approx(600 * MIB, abs=4 * MIB)
    del weights, moments, other
