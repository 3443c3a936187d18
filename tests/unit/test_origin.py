"""What a run keeps of the folders that it was started from."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from dmuon_platform.data import ByteTokenizer, tokenizer_files
from dmuon_platform.errors import FatalError
from dmuon_platform.export import export_model
from dmuon_platform.origin import check_restored, handed_on, keep_origin, start_of
from dmuon_platform.preflight import resolve
from dmuon_platform.spec import JobSpec, job_of
from dmuon_platform.store import CheckpointStore
from small_job import small
from unit.stored import save


def job(tmp_path: Path) -> JobSpec:
    folder = tmp_path / "pretrained"
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "merges.txt", "model.safetensors", "x.bin"):
        (folder / name).write_text(name, encoding="utf-8")
    spec = job_of(small(storage=str(tmp_path), model={"path": str(folder)}))
    spec.run_dir.mkdir(exist_ok=True)
    return spec


def test_all_but_weights_is_kept_once(tmp_path: Path) -> None:
    spec = job(tmp_path)
    keep_origin(spec)
    kept = spec.run_dir / "origin"
    names = {path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file()}
    assert names == {"model/config.json", "model/tokenizer.json", "model/merges.txt"} | {
        "tokenizer.json",
        "merges.txt",
    }
    (tmp_path / "pretrained" / "config.json").write_text("other", encoding="utf-8")
    keep_origin(spec)
    assert (kept / "model" / "config.json").read_text(encoding="utf-8") == "config.json"
    assert [path.name for path in spec.run_dir.iterdir()] == ["origin"]


CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"
SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": "!",
    "eos_token": "<|endoftext|>",
    "model_max_length": 77,
}
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}


def tokenizer_of_a_chat(folder: Path) -> None:
    for name, content in tokenizer_files(ByteTokenizer()).items():
        (folder / name).write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT, encoding="utf-8")


def exported(spec: JobSpec) -> Path:
    checkpoint = CheckpointStore(spec.run_dir).list()[-1]
    config: dict[str, Any] = {"model_type": "llama"}
    return export_model(
        spec.run_dir, checkpoint.path, checkpoint.manifest, config, handed_on(spec)
    ).folder


def test_an_export_has_the_tokenizer_and_the_generation_that_the_run_was_given(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    spec = job(tmp_path)
    given = tmp_path / "pretrained"
    tokenizer_of_a_chat(given)
    (given / "generation_config.json").write_text(json.dumps(SAMPLING), encoding="utf-8")
    (given / "trainer_state.json").write_text("{}", encoding="utf-8")
    keep_origin(spec)
    save(CheckpointStore(spec.run_dir), 1)
    wanted = transformers.GenerationConfig.from_pretrained(given)
    files = handed_on(spec)
    shutil.rmtree(given)

    kept = start_of(spec, tmp_path).spec
    assert handed_on(kept) == files
    assert "trainer_state.json" not in files
    folder = exported(kept)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.chat_template, tokenizer.pad_token) == (CHAT, "!")
    assert tokenizer.model_max_length == 77
    assert transformers.GenerationConfig.from_pretrained(folder) == wanted


def test_a_tokenizer_from_elsewhere_brings_what_lies_beside_it_and_nothing_of_the_model(
    tmp_path: Path,
) -> None:
    spec = job(tmp_path)
    (tmp_path / "pretrained" / "chat_template.jinja").write_text("other", encoding="utf-8")
    (tmp_path / "words").mkdir()
    tokenizer_of_a_chat(tmp_path / "words")
    for name in ("tokenizer.json", "named.json"):
        file = tmp_path / "words" / name
        file.write_text(ByteTokenizer().to_json(), encoding="utf-8")
        data = spec.data.model_copy(update={"tokenizer": str(file)})
        files = handed_on(spec.model_copy(update={"data": data}))
        is_its_own = name == "tokenizer.json"
        assert (files.get("chat_template.jinja") == CHAT.encode()) == is_its_own
        assert (b"model_max_length" in files["tokenizer_config.json"]) == is_its_own
        assert "merges.txt" not in files


def test_a_job_that_names_no_tokenizer_means_that_of_its_model_also_when_that_is_gone(
    tmp_path: Path,
) -> None:
    spec = job(tmp_path)
    keep_origin(spec)
    shutil.rmtree(tmp_path / "pretrained")
    document = small(storage=str(tmp_path), model={"path": str(tmp_path / "pretrained")})
    assert resolve(job_of(document)).data.tokenizer == spec.data.tokenizer
    named = small(storage=str(tmp_path), model=document["model"], data__tokenizer="bytes")
    assert resolve(job_of(named)).data.tokenizer == "bytes"


def test_without_a_checkpoint_everything_must_be_there(tmp_path: Path) -> None:
    spec = job(tmp_path)
    keep_origin(spec)
    (tmp_path / "pretrained" / "config.json").unlink()
    assert start_of(spec, tmp_path).spec == spec


def test_what_is_kept_stands_in_for_nothing_else_that_is_not_there(tmp_path: Path) -> None:
    spec = job(tmp_path)
    keep_origin(spec)
    (spec.run_dir / "job.toml").write_text(spec.to_toml(), encoding="utf-8")
    save(CheckpointStore(spec.run_dir), 1)
    shutil.rmtree(tmp_path / "pretrained")
    assert start_of(spec, tmp_path).spec.model.path == str(spec.run_dir / "origin" / "model")
    for section, key in (("model", "path"), ("data", "tokenizer")):
        wrong = {key: str(tmp_path / "misspelt")}
        changed = getattr(spec, section).model_copy(update=wrong)
        other = start_of(spec.model_copy(update={section: changed}), tmp_path).spec
        assert getattr(getattr(other, section), key) == wrong[key]


def test_weights_are_never_drawn_anew_for_a_run_that_began_with_others(tmp_path: Path) -> None:
    spec = job(tmp_path)
    check_restored(spec, 0)
    keep_origin(spec)
    kept = spec.model.model_copy(update={"path": str(spec.run_dir / "origin" / "model")})
    standing_in = spec.model_copy(update={"model": kept})
    check_restored(standing_in, 10)
    with pytest.raises(FatalError, match="so there are no weights to begin with"):
        check_restored(standing_in, 0)
    (tmp_path / "pretrained" / "model.safetensors").unlink()
    with pytest.raises(FatalError, match="or its weights are"):
        check_restored(spec, 0)
