"""What a finished run prints: where it can be seen."""

from pathlib import Path

import pytest
from dmuon_platform.summary import Summary
from dmuon_platform.tracking import Delivery


@pytest.mark.parametrize(
    ("uri", "way"),
    [
        ("http://127.0.0.1:5000/", "http://127.0.0.1:5000/#/experiments/4/runs/abc"),
        ("sqlite:///runs/mlflow.db", "mlflow ui --backend-store-uri sqlite:///runs/mlflow.db"),
    ],
)
def test_the_page_of_the_run_itself_is_named(uri: str, way: str, tmp_path: Path) -> None:
    summary = Summary("mine", 10, 100, 0, 2.0, 3.0, "checkpoints/x", "0" * 64)
    told = summary.delivered(
        Delivery(uri, "4", "abc", None, None, is_complete=True, problem=None),
        "champion",
        tmp_path / "report.html",
    )
    assert way in told.text()
