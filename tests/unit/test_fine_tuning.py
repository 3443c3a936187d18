"""What a job with ``model.path`` is refused for before anything starts."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dmuon_platform import cli
from dmuon_platform.data import ByteTokenizer, tokenizer_files
from dmuon_platform.preflight import check_job
from dmuon_platform.spec import job_of
from small_job import small

transformers = pytest.importorskip("transformers", reason="needs the hf extra")

SHARDED = "model-00001-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of bytes that transformers has written."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=256, num_attention_heads=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "given")
    for name, content in tokenizer_files(ByteTokenizer()).items():
        (tmp_path / "given" / name).write_bytes(content)
    return tmp_path / "given"


@pytest.fixture
def validate(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Return `dmuon validate` of a job that fine-tunes the folder: exit code and what it says."""

    def told(**changes: Any) -> tuple[int, str]:
        document = small(storage=str(tmp_path / "runs"), model={"path": str(folder)}, **changes)
        job = tmp_path / "job.json"
        job.write_text(json.dumps(document), encoding="utf-8")
        code = cli.main(["validate", str(job)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return told


def test_a_whole_folder_is_planned_with_its_tokenizer(
    folder: Path, validate: Callable[..., tuple[int, str]]
) -> None:
    code, text = validate()
    assert code == 0, text
    assert f"tokenizer: {folder / 'tokenizer.json'}, 256 tokens" in text


def test_samples_longer_than_the_positions_of_the_model_are_warned_of(
    folder: Path, validate: Callable[..., tuple[int, str]]
) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for positions, is_beyond in ((128, False), (100, True)):
        config["max_position_embeddings"] = positions
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        if is_beyond:
            with pytest.warns(UserWarning, match="and the model of model.path states 100 pos"):
                assert validate()[0] == 0
        else:
            assert validate()[0] == 0


def _remove(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _point_to_large_files(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def _lose_a_shard(folder: Path) -> None:
    whole = folder / "model.safetensors"
    whole.rename(folder / SHARDED)
    names = {"a": SHARDED, "b": SHARDED.replace("-00001-", "-00002-")}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}), encoding="utf-8")


def _break_the_index(folder: Path) -> None:
    _remove(folder)
    (folder / "model.safetensors.index.json").write_text("[]", encoding="utf-8")


def _pickle(folder: Path, *, cut: int, is_archive: bool = True) -> None:
    _remove(folder)
    file = folder / "pytorch_model.bin"
    weights = {"a": torch.ones(1000)}
    torch.save(weights, file, _use_new_zipfile_serialization=is_archive)
    file.write_bytes(file.read_bytes()[:-cut])


def _cut_a_pickle(folder: Path) -> None:
    _pickle(folder, cut=10)


def _cut_an_old_pickle(folder: Path) -> None:
    _pickle(folder, cut=1000, is_archive=False)


def _pickle_code(folder: Path) -> None:
    _remove(folder)
    torch.save({"a": Path("x")}, folder / "pytorch_model.bin")


def _pickle_old_code(folder: Path) -> None:
    _remove(folder)
    file = folder / "pytorch_model.bin"
    torch.save({"a": Path("x")}, file, _use_new_zipfile_serialization=False)


def _pickle_a_list(folder: Path) -> None:
    _remove(folder)
    torch.save([1, 2], folder / "pytorch_model.bin")


def _pickle_more_than_tensors(folder: Path) -> None:
    _remove(folder)
    torch.save({"step": 3, "model": {"a": torch.ones(2)}}, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_remove, "has a config.json but no weights"),
        (_cut, "are cut or damaged"),
        (_cut_a_pickle, "are cut or damaged (torch.load cannot read them). Copy or"),
        (_cut_an_old_pickle, "one that Git LFS keeps comes with"),
        (_pickle_code, "write model.state_dict() with torch.save, or with safetensors"),
        (_pickle_old_code, "write model.state_dict() with torch.save, or with safetensors"),
        (_pickle_a_list, "holds other things than a dict of tensors"),
        (_pickle_more_than_tensors, "holds other things than a dict of tensors"),
        (_point_to_large_files, "one that Git LFS keeps comes with"),
        (_lose_a_shard, "lacks the weights model-00002-of-00002.safetensors"),
        (_break_the_index, "cannot be read as an index of weights"),
    ],
)
def test_weights_that_are_not_all_there_are_refused(
    folder: Path,
    validate: Callable[..., tuple[int, str]],
    damage: Callable[[Path], None],
    said: str,
) -> None:
    damage(folder)
    code, text = validate()
    assert code == 78, text
    assert said in text
    assert f"model.path: {'the weights ' if 'Git' in text else ''}{folder}" in text


@pytest.mark.parametrize(
    "stray",
    [
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "model.safetensors.index.json",
        "adapter_model.safetensors",
    ],
)
def test_what_lies_beside_the_weights_is_not_looked_at(
    folder: Path, validate: Callable[..., tuple[int, str]], stray: str
) -> None:
    (folder / stray).write_text('{"weight_map": {"a": "no-such-file"}}')
    assert validate()[0] == 0


def test_pickled_weights_that_their_index_does_not_name_are_not_looked_at(
    folder: Path, validate: Callable[..., tuple[int, str]]
) -> None:
    _remove(folder)
    one, other = (f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2))
    torch.save({"a": torch.ones(9)}, folder / one)
    (folder / other).write_bytes(b"PK")
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": one}}), encoding="utf-8")
    assert validate()[0] == 0


def test_pickled_weights_are_weights(
    folder: Path, validate: Callable[..., tuple[int, str]]
) -> None:
    _remove(folder)
    for is_archive in (True, False):
        file = folder / "pytorch_model.bin"
        torch.save({"a": torch.ones(9)}, file, _use_new_zipfile_serialization=is_archive)
        assert validate()[0] == 0


def test_a_run_with_a_checkpoint_needs_neither_weights_nor_a_tokenizer_there(
    folder: Path,
) -> None:
    _remove(folder)
    (folder / "tokenizer.json").unlink()
    check_job(job_of(small(model={"path": str(folder)})), begins=False)


@pytest.mark.parametrize("command", ["run", "chaos", "bench-recovery"])
def test_whatever_launches_a_job_refuses_it_before_anything_is_made(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "tokenizer.json").unlink()
    job = tmp_path / "job.json"
    document = small(storage=str(tmp_path / "runs"), model={"path": str(folder)})
    job.write_text(json.dumps(document), encoding="utf-8")
    assert cli.main([command, str(job)]) == 78
    assert "data.tokenizer is not set" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_bytes_are_taken_for_a_model_only_when_the_job_says_so(
    folder: Path, validate: Callable[..., tuple[int, str]]
) -> None:
    (folder / "tokenizer.json").unlink()
    code, text = validate()
    assert code == 78, text
    assert "data.tokenizer is not set" in text
    assert "for a model whose tokens are bytes, write data.tokenizer = 'bytes'" in text
    (folder / "vocab.json").write_text("{}", encoding="utf-8")
    (folder / "merges.txt").write_text("", encoding="utf-8")
    code, text = validate()
    assert code == 78, text
    assert "has no tokenizer.json, but vocab.json and merges.txt" in text
    assert "Make the file of these, with `transformers`: " in text
    assert f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')" in text
    code, text = validate(data__tokenizer="bytes")
    assert code == 0, text
    assert "tokenizer: bytes, 256 tokens" in text


def test_text_too_short_for_a_sample_or_a_batch_is_refused_and_nothing_is_left(
    validate: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    for length, said in [
        (100, "training tokens, fewer than one sample of data.sequence_length + 1 = 129"),
        (1000, "tokens, fewer than one sample of data.sequence_length + 1 = 129"),
        (3200, "fewer than one batch of train.global_batch_size = 32"),
    ]:
        text.write_text("words and " * (length // 10), encoding="utf-8")
        code, output = validate(data__source=str(text))
        assert code == 78, output
        assert said in output
    text.write_text("words and " * 1000, encoding="utf-8")
    code, output = validate(data__source=str(text))
    assert code == 0, output
    assert re.search(r"text: \d\d samples an epoch, \d held out", output)
    assert not (tmp_path / "runs").exists()
    code, output = validate()
    assert "whether it fills a batch is seen when the job runs" in output
