"""Random models, meshes and orders of calls equal one process; `tests/fuzz.py` runs many more."""

import pytest
from fuzz import run_seeds

SEEDS_IN_CI = range(12)
# gradients missed by clipping after an evaluation
FAILED_ONCE: dict[int, list[int]] = {1: [13, 14], 2: [16, 18], 3: [13], 4: [18]}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_random_cases_equal_one_process(world_size: int) -> None:
    run_seeds(world_size, [*FAILED_ONCE[world_size], *SEEDS_IN_CI])
