"""Every job file that we ship is right, and can be planned."""

from pathlib import Path

import pytest
from dmuon_platform.outline import owner_plan
from dmuon_platform.spec import job_of, load_job
from dmuon_platform.spec.fields import all_keys
from dmuon_platform.spec.reference import reference
from dmuon_platform.spec.resume import MAY_CHANGE

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "jobs").glob("*.toml"))


def test_the_three_jobs_of_the_readme_are_there() -> None:
    assert {"tiny_cpu", "gpt_125m_fsdp", "llama_1b_hsdp"} <= {job.stem for job in JOBS}


def test_the_guide_has_every_job_every_key_and_what_may_change() -> None:
    guide = (ROOT / "jobs" / "README.md").read_text(encoding="utf-8")
    assert guide.endswith(reference()), "print it anew with: dmuon schema --markdown"
    assert all(f"({job.name})" in guide for job in JOBS)
    assert all(f"`{key}`" in guide for key in MAY_CHANGE)


@pytest.mark.parametrize("key", list(all_keys()))
def test_every_key_has_its_line(key: str) -> None:
    section, _, name = key.rpartition(".")
    tables = reference().split("\n### ")
    (table,) = [each for each in tables if each.startswith(f"`[{section}]`")] or tables[:1]
    assert f"| `{name}` |" in table


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_a_job_of_ours_parses_and_plans(job: Path) -> None:
    spec = load_job(job)
    assert spec.name == job.stem
    assert spec.num_steps > 0
    for num_workers in spec.fitting_workers:
        replicate, shard = spec.resolve_mesh(num_workers)
        assert replicate * shard == num_workers
        micro_batches = spec.accumulation(num_workers)
        rows = micro_batches * spec.train.micro_batch_size * num_workers
        assert rows == spec.train.global_batch_size
        plan = owner_plan(spec, num_workers)
        assert len(set(plan.owners)) == num_workers
        assert plan.imbalance < 1.15


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_a_job_of_ours_is_commented_and_resolves_to_itself(job: Path) -> None:
    text = job.read_text(encoding="utf-8")
    assert text.startswith("# ")
    spec = load_job(job)
    import tomllib

    assert job_of(tomllib.loads(spec.to_toml())) == spec


def test_hsdp_is_planned_as_two_copies_over_eight() -> None:
    spec = load_job(ROOT / "jobs" / "llama_1b_hsdp.toml")
    assert spec.resolve_mesh(16) == (2, 8)
