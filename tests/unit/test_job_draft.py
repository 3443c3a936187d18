"""``dmuon init`` writes a job that is right, explained, and for this machine."""

import json
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dmuon_platform import cli
from dmuon_platform.job_draft import Hardware, draft
from dmuon_platform.spec import load_job

GPUS = Hardware(num_workers=8, cores=12, has_gpus=True)
CPUS = Hardware(num_workers=3, cores=1, has_gpus=False)


def test_what_it_writes_is_a_job_of_that_name_that_can_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words " * 5000, encoding="utf-8")
    job = tmp_path / "my job.toml"
    assert cli.main(["init", str(job), "--data", str(text), "--workers", "2"]) == 0
    assert f"dmuon run '{job}'" in capsys.readouterr().out
    spec = load_job(job)
    assert (spec.name, spec.resources.workers) == ("my-job", 2)
    assert spec.data.source == str(text)
    assert spec.resources.gpus_per_worker == int(torch.cuda.is_available())
    assert cli.main(["validate", str(job), "--set", f"storage={tmp_path / 'runs'}"]) == 0


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions"])
@pytest.mark.parametrize("hardware", [GPUS, CPUS])
def test_of_a_model_to_fine_tune_sizes_and_tokenizer_are_its_own(
    hardware: Hardware, key: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(f'{{"{key}": 100}}', encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    torch.save({}, tmp_path / "pytorch_model.bin")
    for name, model in (("scratch", None), ("tuned", str(tmp_path))):
        text = draft(name, hardware, None, None, model)
        (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")
    scratch, tuned = (load_job(tmp_path / f"{name}.toml") for name in ("scratch", "tuned"))
    assert tuned.model.path == str(tmp_path)
    assert tuned.data.tokenizer == str(tmp_path / "tokenizer.json")
    assert tuned.data.sequence_length == 100
    assert tuned.optimizer.lr == pytest.approx(scratch.optimizer.lr / 10)
    assert tuned.optimizer.adamw_lr == pytest.approx(scratch.optimizer.adamw_lr / 10)
    rates = [line for line in (tmp_path / "tuned.toml").read_text().splitlines() if "lr = " in line]
    assert rates
    assert max(map(len, rates)) < 20  # nothing like 0.00030000000000000003
    assert tuned.optimizer.weight_decay == scratch.optimizer.weight_decay


@pytest.mark.parametrize("hardware", [GPUS, CPUS])
def test_every_key_is_explained_and_every_section_fits_the_machine(
    hardware: Hardware, tmp_path: Path
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(draft("job", hardware, None, None), encoding="utf-8")
    spec = load_job(job)
    assert spec.resources.workers == hardware.num_workers
    assert spec.accumulation(hardware.num_workers) == 1
    assert spec.train.precision == ("bfloat16" if hardware.has_gpus else "float32")
    lines = job.read_text(encoding="utf-8").splitlines()
    for above, line in pairwise(lines):
        assert "=" not in line or line.startswith("#") or above.startswith("# "), line
    assert max(map(len, lines)) <= 100


def test_the_only_field_with_text_is_written_and_of_several_one_must_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    records = {
        "one.jsonl": {"id": 7, "body": "words"},
        "default.jsonl": {"title": "a", "text": "words"},
        "two.jsonl": {"question": "a", "answer": "b"},
        "none.jsonl": {"messages": [{"content": "a"}]},
    }
    for name, record in records.items():
        (tmp_path / name).write_text(f"{json.dumps(record)}\n" * 300, encoding="utf-8")
    pq.write_table(pa.table({"body": ["words"], "number": [1]}), "one.parquet")

    def field(data: str, *more: str) -> str | None:
        Path("job.toml").unlink(missing_ok=True)
        if cli.main(["init", "job.toml", "--data", data, *more]) == 78:
            return None
        return load_job(Path("job.toml")).data.text_field

    assert field("one.jsonl") == field("one.parquet") == "body"
    assert field("default.jsonl") == "text"
    assert field("two.jsonl", "--text-field", "answer") == "answer"
    capsys.readouterr()
    assert field("two.jsonl") is None
    assert "two.jsonl have text under ['question', 'answer']" in capsys.readouterr().err
    assert field("one.jsonl", "--text-field", "id") is None
    assert "holds the documents: --text-field FIELD" in capsys.readouterr().err
    assert field("none.jsonl") is None
    assert "have text under no field" in capsys.readouterr().err
    Path("plain.txt").write_text("words", encoding="utf-8")
    assert field("plain.txt", "--text-field", "body") is None
    assert "is for JSONL and Parquet, and --data names none" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", [["--data", "a.txt", "b.txt"], ["--data", "a.txt", "--data", "b.txt"]]
)
def test_all_files_that_are_named_are_in_the_job(
    given: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        Path(name).write_text("words " * 5000, encoding="utf-8")
    assert cli.main(["init", "job.toml", *given]) == 0
    assert list(load_job(Path("job.toml")).data.source) == ["a.txt", "b.txt"]
    assert "or, on a Ray cluster, dmuon submit job.toml" in capsys.readouterr().out


def test_a_text_that_the_next_command_refuses_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for length in (10, 150, 9000):
        Path("text.txt").write_text("words and " * length, encoding="utf-8")
        Path("job.toml").unlink(missing_ok=True)
        assert cli.main(["init", "job.toml", "--data", "text.txt", "--workers", "1"]) == 0
        told = capsys.readouterr().out
        code = cli.main(["validate", "job.toml"])
        _, _, refusal = capsys.readouterr().err.partition("dmuon: ")
        assert code == (0 if length == 9000 else 78)
        assert ("Each of them will refuse it as it stands: " in told) == (code == 78)
        assert refusal in told


def test_a_model_without_weights_and_a_tokenizer_that_does_not_fit_it_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("given").mkdir()
    config = Path("given", "config.json")
    config.write_text('{"vocab_size": 255}', encoding="utf-8")

    def init(*more: str) -> tuple[int, str]:
        code = cli.main(["init", "job.toml", "--model", "given", *more])
        return code, capsys.readouterr().err

    code, said = init("--tokenizer", "bytes")
    assert code == 78
    assert "has a config.json but no weights" in said
    torch.save({}, "given/pytorch_model.bin")
    code, said = init("--tokenizer", "bytes")
    assert code == 78
    assert "has 256 tokens, but the model in given (model.path) knows 255" in said
    assert "or have it in that folder and leave data.tokenizer out" in said
    assert "model.vocab_size" not in said
    code, said = init()
    assert code == 78
    assert "(for `dmuon init`: --tokenizer bytes)" in said
    assert not Path("job.toml").exists()
    config.write_text('{"vocab_size": 256}', encoding="utf-8")
    assert init("--tokenizer", "bytes")[0] == 0
    assert load_job(Path("job.toml")).data.tokenizer == "bytes"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["there.toml"], "there.toml is there already"),
        (["no/where.toml"], "there is no folder no"),
        (["new.toml", "--data", "*.nothing"], "No file matches --data '*.nothing'"),
        (["new.toml", "--tokenizer", "none.json"], "There is no tokenizer 'none.json'"),
        (["new.toml", "--model", "none"], "model.path: none: there is no such folder"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.toml").write_text("mine")
    assert cli.main(["init", *arguments]) == 78
    assert said in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["there.toml"]
    assert (tmp_path / "there.toml").read_text() == "mine"
