"""Errors travel between processes whole."""

import pickle

import pytest
from dmuon_platform.errors import (
    AlreadyRunning,
    Diverged,
    FatalError,
    GracefulStop,
    NoCluster,
    PlatformError,
    SpecError,
)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (PlatformError, 1),
        (SpecError, 78),
        (GracefulStop, 75),
        (Diverged, 86),
        (FatalError, 70),
        (AlreadyRunning, 3),
        (NoCluster, 69),
    ],
)
def test_an_error_survives_pickling_with_its_exit_code(
    kind: type[PlatformError], code: int
) -> None:
    raised = kind("mesh.shard: 3 does not divide 4 workers.")
    error = pickle.loads(pickle.dumps(raised))
    assert type(error) is kind
    way_out = " Run it again to go on." if kind is GracefulStop else ""
    assert str(error) == f"mesh.shard: 3 does not divide 4 workers.{way_out}"
    assert error.exit_code == code
