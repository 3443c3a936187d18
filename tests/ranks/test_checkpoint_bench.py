"""The checkpoint benchmark: all contenders on the same model, and what it says of their files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMES = ("save_s", "load_s", "cold_load_s")


def test_all_ways_to_save_are_measured_in_one_run(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    options = ["--ranks", "1,2", "--width", "64", "--layers", "2", "--rounds", "1"]
    call = [sys.executable, "-m", "dmuon.bench.checkpoint", *options, "--json", str(output)]
    done = subprocess.run(
        [*call, "--folder", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [each.name for each in tmp_path.iterdir()] == [output.name], "nothing is left"
    result = json.loads(output.read_text())
    assert [run["ranks"] for run in result["runs"]] == [1, 2]
    for run in result["runs"]:
        ours, torchs, unhashed, gathered = run["ways"].values()
        assert unhashed["bytes"] == pytest.approx(ours["bytes"], rel=1e-3)  # times in the manifest
        assert all(way[time] > 0 for way in run["ways"].values() for time in TIMES)
        assert ours["blocked_s"] > 0
        assert torchs["blocked_s"] > 0
        assert gathered["blocked_s"] is None
        assert 1 <= ours["most_written_over_mean"] <= 1.15
        # two moments of every matrix against one
        assert 1.2 < torchs["bytes"] / ours["bytes"] < 1.7
        for way in run["ways"].values():
            assert all(rate["min"] <= rate["median"] for rate in way["rates"].values())
        assert {rate["median"] for rate in torchs["rates"].values()} == {1.0}
    assert result["runs"][0]["load_other_mesh"] is None
    assert result["runs"][1]["load_other_mesh"]["median"] > 0
    assert "written on another mesh" in done.stdout
