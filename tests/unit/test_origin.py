"""What a run keeps of the folders that it was started from."""

import shutil
from pathlib import Path

import pytest
from dmuon_platform.errors import FatalError
from dmuon_platform.origin import check_restored, keep_origin, start_of
from dmuon_platform.preflight import resolve
from dmuon_platform.spec import JobSpec, job_of
from small_job import small


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
        "tokenizer.json"
    }
    (tmp_path / "pretrained" / "config.json").write_text("other", encoding="utf-8")
    keep_origin(spec)
    assert (kept / "model" / "config.json").read_text(encoding="utf-8") == "config.json"
    assert [path.name for path in spec.run_dir.iterdir()] == ["origin"]


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
