"""A job that is launched where a run of its name has been."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from dmuon_platform.errors import SpecError
from dmuon_platform.events import Journal
from dmuon_platform.lengthening import rise_of_rate
from dmuon_platform.preflight import check_earlier_run, check_from_afar
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


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Nobody may read the folder meanwhile, root neither."""
    user = os.geteuid()
    folder.chmod(0)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o700)


def test_what_may_not_be_read_from_afar_is_left_to_the_launch(tmp_path: Path) -> None:
    spec = left(tmp_path, done=30, train__steps=40)
    other = job_of(small(storage=str(tmp_path), train__steps=20))
    with pytest.raises(SpecError, match="'small' has done 30"):
        check_from_afar(other)
    with closed(spec.run_dir / "checkpoints"):
        check_from_afar(other)
    with closed(spec.run_dir):
        check_from_afar(other)


def test_a_run_that_went_on_after_its_end_is_not_finished_there(tmp_path: Path) -> None:
    spec = left(tmp_path, done=30, train__steps=40)
    Journal(spec.run_dir).append("finished", steps=20)
    with pytest.raises(SpecError, match="'small' has done 30"):
        check_earlier_run(wants(tmp_path, 25))


@pytest.mark.parametrize(("kind", "before"), [("wsd", "0.25"), ("cosine", "0.0245")])
def test_a_rate_that_had_come_down_and_rises_again_is_told_once(kind: str, before: str) -> None:
    spec = job_of(small(train__steps=40, schedule={"kind": kind}))
    to_the_end = [{"kind": "training_started", "step": 0}, {"kind": "trained", "step": 10}]
    if kind == "wsd":
        to_the_end[-1]["step"] = 20
    told = rise_of_rate(spec, to_the_end)
    assert told is not None
    assert f"rises again after step {to_the_end[-1]['step']}, from {before} to" in told
    assert f"schedule.kind={kind} comes down at the end of all 40 steps" in told
    assert rise_of_rate(spec, [*to_the_end, {"kind": "training_started", "step": 10}]) is None


@pytest.mark.parametrize(
    ("changes", "events"),
    [
        ({}, []),
        ({}, [{"kind": "trained", "step": 40}]),
        ({}, [{"kind": "trained"}]),
        ({"schedule": {"kind": "constant"}}, [{"kind": "trained", "step": 20}]),
    ],
)
def test_a_rate_that_does_not_rise_is_not_spoken_of(
    changes: dict[str, Any], events: list[dict[str, Any]]
) -> None:
    assert rise_of_rate(job_of(small(train__steps=40, **changes)), events) is None
