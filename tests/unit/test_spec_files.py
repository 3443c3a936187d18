"""TOML, YAML and JSON say the same; files that cannot be read are refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from dmuon_platform.errors import SpecError
from dmuon_platform.spec import job_of, load_job
from small_job import SMALL, small


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_the_three_formats_give_the_same_job(tmp_path: Path) -> None:
    document = small(optimizer={"adamw_lr": 1e-3, "adamw_betas": [0.8, 0.9]}, data__source=["a"])
    job = job_of(document)
    files = [
        written(tmp_path, "job.toml", job.to_toml()),
        written(tmp_path, "job.yaml", yaml.safe_dump(document)),
        written(tmp_path, "job.yml", yaml.safe_dump(document)),
        written(tmp_path, "job.json", json.dumps(document)),
    ]
    assert [load_job(file) for file in files] == [job] * 4


def test_yaml_reads_numbers_with_an_exponent(tmp_path: Path) -> None:
    text = yaml.safe_dump(SMALL) + "optimizer:\n  lr: 2e-2\n  adamw_eps: 1E-8\n"
    job = load_job(written(tmp_path, "job.yaml", text))
    assert (job.optimizer.lr, job.optimizer.adamw_eps) == (0.02, 1e-8)


@pytest.mark.parametrize("nothing", ["none"])
def test_none_means_no_value_where_that_is_possible(nothing: str) -> None:
    job = job_of(small(evaluation__every=nothing, train__clip_grad_norm=nothing, name=nothing))
    assert job.evaluation.every is None
    assert job.train.clip_grad_norm is None
    assert job.name == "none"
    with pytest.raises(SpecError, match=r"checkpoint\.every: must be a whole number"):
        job_of(small(checkpoint__every=nothing))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("job.toml", "name = ", "is not TOML that can be read; Invalid value"),
        ("job.toml", 'name = "a"\nname = "b"', "is not TOML that can be read; Cannot overwrite"),
        ("job.json", "{", "is not JSON that can be read"),
        ("job.json", '{"name": "a", "name": "b"}', "the key 'name' is there twice"),
        ("job.yaml", "a: [", "is not YAML that can be read"),
        ("job.yaml", "a: 1\na: 2", "the key 'a' is there twice"),
        ("job.yaml", "[1, 2]: 3", "is not YAML that can be read"),
        ("job.yaml", "- a", "a job is a table of sections, not list"),
        ("job.json", "3", "a job is a table of sections, not int"),
        ("job.ini", "", "a job file ends in one of .toml, .yaml, .yml, .json"),
        ("job.toml", "", "name: is required"),
        ("job.yaml", "", "name: is required"),
        ("job.json", "", "name: is required"),
        ("job.toml", "name = 2020-01-01", "name: must be text, not 2020-01-01 (date)"),
    ],
)
def test_a_file_that_is_no_job_is_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_job(written(tmp_path, name, text))
    assert words in str(caught.value)
    assert name in str(caught.value)


def test_a_file_that_is_not_there_is_answered_with_its_neighbour(tmp_path: Path) -> None:
    written(tmp_path, "tiny_cpu.toml", "")
    with pytest.raises(SpecError, match=r"no such file; did you mean .*tiny_cpu\.toml\?"):
        load_job(tmp_path / "tiny_cpo.toml")
    with pytest.raises(SpecError, match="does not exist either"):
        load_job(tmp_path / "nowhere" / "job.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(SpecError, match="cannot be read"):
        load_job(tmp_path / "folder.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(SpecError, match="is not UTF-8 text"):
        load_job(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("assignment", "key", "value"),
    [
        ("train.steps=5", "train.steps", 5),
        ("train.steps = 5", "train.steps", 5),
        ("train.compile=true", "train.compile", True),
        ("optimizer.lr=1e-2", "optimizer.lr", 0.01),
        ("optimizer.adamw_betas=[0.5,0.6]", "optimizer.adamw_betas", (0.5, 0.6)),
        ("name=007", "name", "007"),
        ('name="quoted"', "name", "quoted"),
        ("storage=/a b", "storage", "/a b"),
        ("schedule.kind=cosine", "schedule.kind", "cosine"),
        ("evaluation.every=none", "evaluation.every", None),
        ("tracking.uri=http://127.0.0.1:5000", "tracking.uri", "http://127.0.0.1:5000"),
        ("data.source=text/*.txt", "data.source", "text/*.txt"),
        ("resources.workers=4", "resources.workers", 4),
    ],
)
def test_set_changes_one_key(tmp_path: Path, assignment: str, key: str, value: Any) -> None:
    found: Any = load_job(written(tmp_path, "job.toml", job_of(SMALL).to_toml()), [assignment])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_set_can_take_a_table_and_go_into_it(tmp_path: Path) -> None:
    file = written(tmp_path, "job.toml", job_of(SMALL).to_toml())
    whole = load_job(file, ["resources.workers={min=1, max=2}"])
    parts = load_job(file, ["resources.workers={min=1, max=9}", "resources.workers.max=2"])
    assert whole.resources.bounds == parts.resources.bounds == (1, 2)


def test_set_can_take_a_list_of_sources(tmp_path: Path) -> None:
    file = written(tmp_path, "job.toml", job_of(SMALL).to_toml())
    assert load_job(file, ['data.source=["a", "b"]']).data.source == ("a", "b")


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("train.steps", "must be section.key=value"),
        ("=3", "must be section.key=value"),
        ("train..steps=3", "must be section.key=value"),
        ("train.stps=3", "did you mean train.steps?"),
        ("train.steps=many", 'train.steps: must be a whole number, not "many"'),
        ("name.first=x", "name is 'small' and not a table"),
        ("resources.workers.min=2", "resources.workers is 2 and not a table"),
        ("train.global_batch_size=30", "nearest good values"),
    ],
)
def test_set_is_checked_like_the_file(tmp_path: Path, assignment: str, words: str) -> None:
    file = written(tmp_path, "job.toml", job_of(SMALL).to_toml())
    with pytest.raises(SpecError) as caught:
        load_job(file, [assignment])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("assignment", "key"),
    [
        ("optim.lr=0.1", "optim"),
        ("trian.steps=5", "trian"),
        ("Optimizer.lr=1", "Optimizer"),
        ("optimizer.lr.x=1", "optimizer.lr"),
        ("train.optimizer.lr=1", "train.optimizer"),
    ],
)
def test_a_section_is_told_by_its_option_unless_the_file_has_it(
    tmp_path: Path, assignment: str, key: str
) -> None:
    path = written(tmp_path, "job.json", json.dumps(SMALL))
    with pytest.raises(SpecError, match=rf"\n  --set {key}: "):
        load_job(path, [assignment])
    table: dict[str, Any] = {"x": 2}
    *above, last = key.split(".")
    document = small(**{"__".join([*above, last]): table})
    path = written(tmp_path, "mine.json", json.dumps(document))
    with pytest.raises(SpecError, match=rf"\n  {key}: "):
        load_job(path, [assignment])


def test_what_was_not_written_in_the_file_is_told_by_its_option(tmp_path: Path) -> None:
    text = job_of(SMALL).to_toml().replace("momentum = 0.95", "momentum = 2.0")
    path = written(tmp_path, "job.toml", text)
    changes = ["optimizer.lr=fast", "resources.workers={min=4,max=2}", "resources.address=head"]
    with pytest.raises(SpecError) as caught:
        load_job(path, changes, {"resources.address": "--address"})
    first, *lines = str(caught.value).splitlines()
    assert first == f"{path} has 4 problems:"
    assert [line.partition(":")[0].strip() for line in lines] == [
        "--set optimizer.lr",
        "optimizer.momentum",
        "--set resources.workers",
        "--address sets resources.address",
    ]
