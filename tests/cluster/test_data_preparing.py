"""Tokenising with Ray Data: once, in order, and the same on any number of CPUs."""

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import ray
import tries
from dmuon_platform.data import DatasetInfo, check_size, open_dataset, prepare_dataset
from dmuon_platform.errors import PlatformError, SpecError
from dmuon_platform.evaluation import bigram_bits_per_byte
from tokenizers import Tokenizer, models, pre_tokenizers

pytestmark = pytest.mark.cluster


@dataclass(frozen=True)
class Settings:
    source: str | list[str] = "python-stdlib"
    text_field: str = "text"
    tokenizer: str = "bytes"
    sequence_length: int = 32
    validation_fraction: float = 0.1


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray leaves a token in the home folder
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        folder = tries.persist(_start)
        yield
        ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def _start() -> str:
    folder = tempfile.mkdtemp(prefix="dmuon-", dir="/tmp")  # Ray's sockets need short paths
    try:
        ray.init(
            address="local",
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=150 << 20,
            logging_level="ERROR",
            runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2] / "platform")}},
        )
    except BaseException:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


@pytest.fixture
def settings(tmp_path) -> Settings:
    """Files of very different sizes, in three formats, so that tasks finish out of order."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(12):
        lines = [f"line {line} of file {number}\n" for line in range(1 + number % 4 * 3000)]
        (folder / f"{number:02d}.txt").write_text("".join(lines))
    rows = [{"text": f"row {row} " * (row % 7)} for row in range(300)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Settings(source=str(folder / "*"))


@pytest.fixture
def divided(monkeypatch):
    """Divides the work of any text among tasks of Ray."""
    monkeypatch.setattr("dmuon_platform.data.tokenise._GROUP_BYTES", 1)


def tokens_of(info: DatasetInfo) -> list[bytes]:
    shards = (*info.train_shards, *info.validation_shards)
    return [(Path(info.folder) / shard.file).read_bytes() for shard in shards]


def test_the_order_of_tokens_does_not_depend_on_how_ray_divides_the_work(
    settings, tmp_path, monkeypatch, request
):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ray.data", None)  # which so little text does not need
        one = prepare_dataset(settings, tmp_path / "1")
    request.getfixturevalue("divided")
    many = prepare_dataset(settings, tmp_path / "2")
    assert tokens_of(one) == tokens_of(many)
    assert replace(one, folder="") == replace(many, folder="")

    train, validation = tokens_of(one)
    files = sorted(Path(settings.source).parent.iterdir())
    num_bytes = sum(file.stat().st_size for file in files if file.suffix == ".txt")
    num_bytes += sum(len(f"row {row} " * (row % 7)) for row in range(300))
    assert one.train_bytes + one.validation_bytes == num_bytes
    assert len(train) + len(validation) == 2 * (num_bytes + one.num_documents)
    assert train[:40:2] == b"line 0 of file 0\n\xffli"


def test_a_dataset_is_made_once_and_again_when_it_should_differ(settings, tmp_path):
    first = prepare_dataset(settings, tmp_path)
    made = (Path(first.folder) / "index.json").stat().st_mtime_ns
    assert prepare_dataset(settings, tmp_path) == first
    assert (Path(first.folder) / "index.json").stat().st_mtime_ns == made

    assert prepare_dataset(replace(settings, sequence_length=16), tmp_path) != first
    changed = Path(settings.source).parent / "00.txt"
    changed.write_text("other")
    second = prepare_dataset(settings, tmp_path)
    assert second.digest != first.digest
    assert second.folder != first.folder
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("damage", ["flipped", "cut", "no-index"])
def test_a_damaged_dataset_is_made_again(settings, tmp_path, damage):
    info = prepare_dataset(settings, tmp_path)
    intact = tokens_of(info)
    shard = Path(info.folder) / info.train_shards[0].file
    if damage == "flipped":
        shard.write_bytes(bytes([intact[0][0] ^ 1]) + intact[0][1:])
    elif damage == "cut":
        shard.write_bytes(intact[0][:-2])
    else:
        (Path(info.folder) / "index.json").unlink()
    assert tokens_of(prepare_dataset(settings, tmp_path)) == intact


def test_text_that_fails_late_is_refused_by_name_and_leaves_nothing(settings, tmp_path, divided):
    with (Path(settings.source).parent / "rows.jsonl").open("a") as rows:
        rows.write('{"title": "no text"}\n')
    with pytest.raises(SpecError, match=r"rows\.jsonl, line 301 has the fields \['title'\]"):
        prepare_dataset(settings, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_text_too_short_is_refused(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("short\n" * 100)
    with pytest.raises(SpecError, match="shorter sequence_length"):
        prepare_dataset(Settings(source=str(file), sequence_length=600), tmp_path)
    info = prepare_dataset(Settings(source=str(file), sequence_length=16), tmp_path)
    with pytest.raises(SpecError, match="global_batch_size = 1000"):
        check_size(info, 1000)


def test_a_cache_that_cannot_be_written_is_named(settings, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlatformError, match="cannot be written"):
        prepare_dataset(settings, tmp_path / "file")


def test_a_tokenizer_file_makes_the_ids_that_it_makes_alone(settings, tmp_path, divided):
    vocabulary = {character: number for number, character in enumerate("lineofrw 0123456789\n?")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary | {"</s>": 77}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    by_file = replace(settings, tokenizer=str(tmp_path / "tokenizer.json"))
    info = prepare_dataset(by_file, tmp_path)
    assert (info.vocab_size, info.separator_id) == (78, 77)
    ids = open_dataset(info.folder)._train.read(0, 18).tolist()
    assert ids == [*tokenizer.encode("line 0 of file 0\n").ids, 77]
    bytes_info = prepare_dataset(settings, tmp_path)
    assert bigram_bits_per_byte(open_dataset(info.folder)) == bigram_bits_per_byte(
        open_dataset(bytes_info.folder)
    )


def test_the_standard_library_is_enough_to_learn_from(tmp_path):
    info = prepare_dataset(Settings(sequence_length=256, validation_fraction=0.05), tmp_path)
    assert info.train_tokens > 5e6
    assert info.validation_bytes / (info.train_bytes + info.validation_bytes) == pytest.approx(
        0.05, abs=0.001
    )
    assert 2.5 < bigram_bits_per_byte(open_dataset(info.folder)) < 4.5
