"""A program that ends while it still saves: it commits, or says what is lost, and always ends."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import ending_program
import pytest
from ranks_runner import run_ranks
from wrapped import make_mesh, prepare

import dmuon
from dmuon.checkpoint.manifest import MANIFEST_FILE

LONGEST_S = 90.0


def run_program(folder: Path, how: str, ends: tuple[int, ...]) -> list[tuple[int | None, str]]:
    """Exit code and errors of the ranks in ``ends``, which must end by themselves."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ending_program.__file__]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "store"), str(folder / "new"), how],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [ranks[rank].communicate(timeout=LONGEST_S)[1] for rank in ends]
        return [(ranks[rank].returncode, text) for rank, text in zip(ends, errors, strict=True)]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_a_program_that_returns_is_kept_until_it_has_committed(tmp_path: Path) -> None:
    reports = run_program(tmp_path, "returns", ends=(0, 1))
    assert [code for code, _ in reports] == [0, 0], reports
    assert dmuon.verify_checkpoint(tmp_path / "new").step == 0


def test_a_program_that_returns_is_not_kept_for_ever_by_a_rank_that_hangs(tmp_path: Path) -> None:
    ((code, text),) = run_program(tmp_path, "returns alone", ends=(0,))
    assert code == 0, text
    assert f"{tmp_path / 'new'}" in text
    assert "UserWarning" in text
    assert not (tmp_path / "new" / MANIFEST_FILE).exists()


def test_a_program_that_has_failed_does_not_wait_for_a_rank_that_hangs(tmp_path: Path) -> None:
    ((code, text),) = run_program(tmp_path, "raises", ends=(0,))
    assert code == 1, text
    assert "ValueError: the training has failed" in text
    assert f"the checkpoint {tmp_path / 'new'} was not finished within 1 s" in text
    assert not (tmp_path / "new" / MANIFEST_FILE).exists()


def test_a_rank_that_fails_takes_those_with_it_that_wait_for_its_part(tmp_path: Path) -> None:
    (_, ours), (code, theirs) = run_program(tmp_path, "raises to a peer", ends=(0, 1))
    assert "ValueError: the training has failed" in ours
    assert code == 1
    assert f"CheckpointError: {tmp_path / 'new'}: another rank is gone" in theirs


@pytest.mark.parametrize("timeout", [timedelta(0), 5.0], ids=str)
def test_a_timeout_that_is_none_is_refused(timeout: object, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        with pytest.raises(dmuon.CheckpointError, match="timeout must be a positive datetime"):
            dmuon.save_checkpoint(tmp_path / "new", model, timeout=timeout)
        with pytest.raises(dmuon.CheckpointError, match="must pass the same path and timeout"):
            dmuon.save_checkpoint(tmp_path / "new", model, timeout=timedelta(hours=1 + rank))
        assert not (tmp_path / "new").exists()

    run_ranks(2, body)
