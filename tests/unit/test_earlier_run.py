"""A job that is launched where a run of its name has been."""

from pathlib import Path
from typing import Any

import pytest
from dmuon_platform.errors import SpecError
from dmuon_platform.events import Journal
from dmuon_platform.preflight import check_earlier_run
from dmuon_platform.spec import JobSpec, job_of
from dmuon_platform.store import CheckpointStore
from small_job import small
from unit.stored import save


def left(folder: Path, *, done: int, **changes: Any) -> JobSpec:
    """A run in that folder, which has done some steps."""
    spec = job_of(small(storage=str(folder), **changes))
    spec.run_dir.mkdir()
    (spec.run_dir / "job.toml").write_text(spec.to_toml(), encoding="utf-8")
    save(CheckpointStore(spec.run_dir), done)
    return spec


def wants(folder: Path, steps: int) -> JobSpec:
    return job_of(small(storage=str(folder), train__steps=steps))


def test_fewer_steps_than_were_done_are_refused_unless_the_run_has_finished(tmp_path: Path) -> None:
    spec = left(tmp_path, done=30, train__steps=40)
    with pytest.raises(SpecError, match="'small' has done 30"):
        check_earlier_run(wants(tmp_path, 20))
    check_earlier_run(wants(tmp_path, 30))
    Journal(spec.run_dir).append("finished", steps=30)
    check_earlier_run(wants(tmp_path, 20))  # there is nothing to do
    check_earlier_run(wants(tmp_path, 40))


def test_a_run_that_went_on_after_its_end_is_not_finished_there(tmp_path: Path) -> None:
    spec = left(tmp_path, done=30, train__steps=40)
    Journal(spec.run_dir).append("finished", steps=20)
    with pytest.raises(SpecError, match="'small' has done 30"):
        check_earlier_run(wants(tmp_path, 25))
