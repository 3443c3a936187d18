"""What a job says about itself, and how it travels."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dmuon_platform.errors import SpecError
from dmuon_platform.spec import JobSpec, job_of, load_job
from hypothesis import given
from hypothesis import strategies as st
from small_job import SMALL, small

ROOT = Path(__file__).parents[2]


def test_steps_follow_from_tokens_rounded_up() -> None:
    job = job_of(small(train__steps=None, train__tokens=4096 * 3 + 1))
    assert job.tokens_per_step == 4096
    assert job.num_steps == 4


@pytest.mark.parametrize(
    ("mesh", "workers", "resolved"),
    [
        ({}, 4, (1, 4)),
        ({"replicate": 2}, 4, (2, 2)),
        ({"replicate": None, "shard": 2}, 8, (4, 2)),
        ({"replicate": 2, "shard": 2}, 4, (2, 2)),
        ({"replicate": 4}, 4, (4, 1)),
    ],
)
def test_one_side_of_the_mesh_is_inferred(
    mesh: dict[str, Any], workers: int, resolved: tuple[int, int]
) -> None:
    job = job_of(small(mesh=mesh, resources__workers=workers, train__global_batch_size=64))
    assert job.resolve_mesh(workers) == resolved


def test_fewer_workers_than_planned_get_a_mesh_or_an_error() -> None:
    job = job_of(small(mesh__replicate=2, resources__workers=4))
    assert job.resolve_mesh(2) == (2, 1)
    with pytest.raises(SpecError, match="2 does not divide 3 workers"):
        job.resolve_mesh(3)


def test_accumulation_makes_up_for_fewer_workers() -> None:
    job = job_of(SMALL)
    assert [job.accumulation(workers) for workers in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(SpecError, match="nearest good values: 24 or 48"):
        job.accumulation(3)


def test_bounds_of_fixed_and_of_elastic_workers() -> None:
    assert job_of(SMALL).resources.bounds == (2, 2)
    elastic = job_of(small(resources__workers={"min": 1, "max": 2}))
    assert elastic.resources.bounds == (1, 2)


def test_a_job_survives_the_way_to_a_worker() -> None:
    for document in (SMALL, small(resources__workers={"min": 1, "max": 2}, model={"path": "x"})):
        job = job_of(document)
        assert JobSpec.model_validate(job.model_dump(mode="json")) == job
        assert JobSpec.model_validate_json(job.model_dump_json()) == job


@given(
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    storage=st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
        # a URL is refused, a NUL is in no path, and ~ begins the name of a user who may not be here
        lambda text: ":/" not in text and "\0" not in text and not text.startswith("~")
    ),
    lr=st.floats(0, 1e6),
    every=st.none() | st.integers(1, 10**9),
    workers=st.integers(1, 2).flatmap(lambda n: st.sampled_from([n, {"min": 1, "max": n}])),
    source=st.sampled_from(["a", ["a", "b/*.txt"], 'quo"te\\', "tab\t\x7f"]),
)
def test_the_toml_of_a_job_is_that_job(
    name: str, storage: str, lr: float, every: int | None, workers: Any, source: Any
) -> None:
    import tomllib

    if name in {"data", "mlruns", "mlartifacts", "mlflow.db"}:
        return
    document = small(
        name=name,
        storage=storage,
        optimizer={"lr": lr, "adjust_lr_fn": None},
        evaluation__every=every,
        resources__workers=workers,
        data__source=source,
    )
    job = job_of(document)
    assert job_of(tomllib.loads(job.to_toml())) == job


def test_a_model_with_a_tokenizer_is_trained_with_it_unless_another_is_named(
    tmp_path: Path,
) -> None:
    def tokenizer(**changes: Any) -> str:
        return job_of(small(model={"path": str(tmp_path)}, **changes)).data.tokenizer

    assert tokenizer() == "bytes"
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert tokenizer() == str(tmp_path / "tokenizer.json")
    assert tokenizer(data__tokenizer="bytes") == "bytes"
    assert tokenizer(data__tokenizer="other.json") == "other.json"


@pytest.mark.parametrize(
    ("was", "now", "is_same"),
    [
        ("/a/working_dir_files/p1/m/x", "/b/working_dir_files/p2/m/x", True),
        ("/a/working_dir_files/p1/m/x", "/b/working_dir_files/p2/m/y", False),
        ("m/x", "/here/m/x", True),
        ("m/x", "/here/n/x", False),
        ("/a/m/x", "/b/m/x", False),
        ("bytes", "/here/tokenizer.json", False),
    ],
)
def test_a_path_is_the_same_in_another_upload(was: str, now: str, is_same: bool) -> None:
    earlier, later = (job_of(small(data__tokenizer=path)) for path in (was, now))
    assert later.differences_that_forbid_resume(earlier) == (
        [] if is_same else [f"data.tokenizer: {was!r} -> {now!r}"]
    )


def test_the_digest_is_of_what_is_computed_and_not_of_where() -> None:
    job = job_of(SMALL)
    assert job.digest() == job_of(small(storage="/elsewhere")).digest()
    assert job.digest() != job_of(small(train__seed=1)).digest()
    assert job.digest() == job_of(small(optimizer={"lr": 0.02})).digest()


def test_a_run_lives_in_storage_under_its_name(tmp_path: Path) -> None:
    assert job_of(SMALL).run_dir == Path.cwd() / "runs" / "small"
    assert job_of(SMALL).anchored(tmp_path).run_dir == tmp_path / "runs" / "small"
    assert job_of(small(storage="~/x")).run_dir == Path.home() / "x" / "small"
    assert job_of(small(storage="/x")).anchored(tmp_path).storage == "/x"


def test_what_may_change_when_a_run_goes_on() -> None:
    earlier = job_of(SMALL)
    later = job_of(
        small(
            train={
                "steps": 20,
                "global_batch_size": 32,
                "micro_batch_size": 4,
                "reshard_after_forward": False,
            },
            evaluation__every=None,
            checkpoint={"every": 5, "keep_last": 1, "keep_every": 10},
            tracking__log_every=2,
            faults__max_failures=0,
            resources__workers=4,
            mesh__replicate=2,
            export__enabled=False,
            storage="/elsewhere",
        )
    )
    assert later.differences_that_forbid_resume(earlier) == []
    assert "train.steps: 10 -> 20" in later.differences(earlier)
    assert earlier.differences(earlier) == []


def test_the_best_checkpoints_can_be_told_when_each_has_an_evaluation() -> None:
    rule = {"every": 100, "keep_every": 300, "keep_best": 2}
    for between in (25, 50, 100):
        spec = job_of(small(checkpoint=rule, evaluation__every=between))
        assert (spec.checkpoint.keep_every, spec.checkpoint.keep_best) == (300, 2)


def test_what_makes_another_run_is_shown_old_and_new() -> None:
    earlier = job_of(SMALL)
    later = job_of(small(optimizer__lr=0.01, train__global_batch_size=64, model__hidden_size=128))
    assert later.differences_that_forbid_resume(earlier) == [
        "model.hidden_size: 256 -> 128",
        "optimizer.lr: 0.02 -> 0.01",
        "train.global_batch_size: 32 -> 64",
    ]


def test_every_field_says_what_it_is_in_the_schema() -> None:
    schema = JobSpec.model_json_schema()
    definitions = {"JobSpec": schema, **schema["$defs"]}
    for section, definition in definitions.items():
        assert definition["description"]
        for key, field in definition.get("properties", {}).items():
            assert "description" in field or "$ref" in field, f"{section}.{key} is not described"
            assert definition["additionalProperties"] is False


def test_a_job_is_checked_on_a_machine_without_torch_and_ray() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'ray', 'mlflow', 'numpy', 'dmuon', 'rich', 'tokenizers'):\n"
        "    sys.modules[name] = None\n"
        "from dmuon_platform.cli import main\n"
        "from dmuon_platform.spec import load_job\n"
        "load_job('jobs/tiny_cpu.toml')\n"
        "assert main(['run', 'jobs/tiny_cpu.toml', '--set', 'train.stps=1']) == 78\n"
        "sys.exit(main(['schema']))\n"
    )
    environment = {"PYTHONPATH": str(ROOT / "platform"), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "did you mean train.steps?" in done.stderr


def test_the_names_of_values_agree_with_the_library() -> None:
    from typing import get_args

    from dmuon_platform.data import ByteTokenizer
    from dmuon_platform.spec.job import BYTE_VOCABULARY
    from dmuon_platform.spec.optimizer import OptimizerSpec

    from dmuon.muon_update import ADJUST_LR_FNS

    literal, none = get_args(OptimizerSpec.model_fields["adjust_lr_fn"].annotation)
    assert {*get_args(literal), None} == set(ADJUST_LR_FNS)
    assert none is type(None)
    assert ByteTokenizer().vocab_size == BYTE_VOCABULARY


def test_load_job_takes_text_paths(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(job_of(SMALL).to_toml(), encoding="utf-8")
    assert load_job(str(file)) == job_of(SMALL)
