"""Weights are read from wherever they are, alike, and nothing that is read is run."""

import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from unit.checkpoint_builders import raw_safetensors, tensors_by_file, write, write_checkpoint

from dmuon.checkpoint.facts import facts_of
from dmuon.checkpoint.index_file import INDEX_FILE
from dmuon.checkpoint.manifest import MANIFEST_FILE
from dmuon.checkpoint.source import CheckpointSource, open_source
from dmuon.errors import CheckpointError, DamagedCheckpointError, SetupError


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(5, 4, generator=generator),
        "b.weight": torch.randn(3, 4, generator=generator).bfloat16(),
        "c": torch.tensor(2.0),
    }


HALVES = {"a.weight": 1, "b.weight": 2, "c": 1}


def write_sharded(
    folder: Path, index: str, shard: str, save: Callable[[Path, dict[str, Tensor]], object]
) -> Path:
    weight_map = {name: shard.format(half) for name, half in HALVES.items()}
    for half in (1, 2):
        part = {name: tensor for name, tensor in weights().items() if HALVES[name] == half}
        save(folder / shard.format(half), part)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def save_pickled(path: Path, tensors: Mapping[str, object]) -> Path:
    torch.save(tensors, path)
    return path


def save_legacy(path: Path, tensors: Mapping[str, object]) -> Path:
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    return path


def save_file(path: Path, tensors: dict[str, Tensor]) -> Path:
    write(path, tensors)
    return path


def linked(folder: Path) -> Path:
    """As the cache of the Hugging Face hub is."""
    (folder / "blobs").mkdir()
    (folder / "snapshot").mkdir()
    save_file(folder / "blobs" / "0123", weights())
    (folder / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")
    return folder / "snapshot"


def parameters(path: Path) -> Path:
    torch.save(torch.nn.ParameterDict({"x": torch.ones(1)}).state_dict(), path)
    named = {name: torch.nn.Parameter(tensor) for name, tensor in weights().items()}
    return save_pickled(path, OrderedDict(named))


KINDS: dict[str, Callable[[Path], Path]] = {
    "a safetensors file": lambda d: save_file(d / "any.safetensors", weights()),
    "a folder with one": lambda d: save_file(d / "model.safetensors", weights()).parent,
    "a sharded folder": lambda d: write_sharded(d, INDEX_FILE, "m-{}.safetensors", save_file),
    "a folder of links": linked,
    "a pickled file": lambda d: save_pickled(d / "any.pt", weights()),
    "a pickled file of parameters": lambda d: parameters(d / "any.bin"),
    "an old pickled file": lambda d: save_legacy(d / "any.pth", weights()),
    "a folder with a pickled one": lambda d: (
        save_pickled(d / "pytorch_model.bin", weights()).parent
    ),
    "a sharded pickled folder": lambda d: write_sharded(
        d, "pytorch_model.bin.index.json", "p-{}.bin", save_pickled
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_same_wherever_they_are(tmp_path, kind):
    source = open_source(KINDS[kind](tmp_path))
    assert sorted(source.names) == sorted(weights())
    source.verify()
    for name, tensor in weights().items():
        assert source.facts(name) == facts_of(tensor)
        found = source.read(name)
        assert found.dtype == tensor.dtype
        assert type(found) is Tensor
        assert not found.requires_grad
        assert torch.equal(found, tensor)
        if tensor.ndim:
            rows = source.read(name, slice(1, -1))
            assert torch.equal(rows, tensor[1:-1])
            assert rows.untyped_storage().nbytes() == rows.nbytes  # in memory of its own
    with pytest.raises(CheckpointError, match="'nothing'"):
        source.read("nothing")
    with pytest.raises(CheckpointError, match="'nothing'"):
        source.facts("nothing")
    with pytest.raises(SetupError, match="c has no dims"):
        source.read("c", slice(0, 1))
    with pytest.raises(SetupError, match="step of 1"):
        source.read("a.weight", slice(None, None, 2))


def test_what_is_read_is_a_copy(tmp_path):
    source = open_source(save_pickled(tmp_path / "x.bin", weights()))
    source.read("a.weight").zero_()
    assert torch.equal(source.read("a.weight"), weights()["a.weight"])


def test_a_checkpoint_of_ours_has_its_weights_under_all_their_names(tmp_path):
    write_checkpoint(tmp_path / "c")
    source = open_source(str(tmp_path / "c"))
    assert isinstance(source, CheckpointSource)
    assert sorted(source.names) == ["down.weight", "embed.weight", "head.weight", "up.weight"]
    (first, *_) = tensors_by_file().values()
    assert torch.equal(source.read("head.weight"), first["embed.weight"])
    assert torch.equal(source.read("head.weight", slice(2, 4)), first["embed.weight"][2:4])
    assert source.facts("head.weight") == source.facts("embed.weight")
    assert torch.equal(
        source.reader.read("momentum_buffer/up.weight"),
        tensors_by_file()["optim-00001-of-00001.safetensors"]["momentum_buffer/up.weight"],
    )
    with pytest.raises(CheckpointError, match="no weight 'momentum_buffer/up"):
        source.read("momentum_buffer/up.weight")
    source.verify()


def test_a_checkpoint_of_ours_is_verified_by_its_hashes(tmp_path):
    write_checkpoint(tmp_path / "c")
    path = tmp_path / "c" / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    source = open_source(tmp_path / "c")
    source.verify(hashes=False)
    source.verify(only=[file for file in source.files if file != path.name])
    with pytest.raises(DamagedCheckpointError, match="has changed"):
        source.verify()


def test_a_checkpoint_that_was_never_finished_is_not_taken_for_a_hugging_face_one(tmp_path):
    write_checkpoint(tmp_path / "c")
    (tmp_path / "c" / MANIFEST_FILE).unlink()
    write(tmp_path / "c" / "model.safetensors", weights())
    with pytest.raises(DamagedCheckpointError, match="never finished"):
        open_source(tmp_path / "c")


def test_a_changed_manifest_is_not_passed_over_for_the_files_beside_it(tmp_path):
    write_checkpoint(tmp_path / "c")
    write(tmp_path / "c" / "model.safetensors", weights())
    (tmp_path / "c" / MANIFEST_FILE).write_text("{}")
    with pytest.raises(DamagedCheckpointError, match=r"manifest.json cannot be read"):
        open_source(tmp_path / "c")


RAN = "it-ran"


class Harmful:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("save", [save_pickled, save_legacy])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "x.pt"])
def test_a_pickled_file_that_would_run_code_is_refused_and_runs_nothing(tmp_path, save, name):
    harmful = {**weights(), "z": Harmful(tmp_path / RAN)}
    path = save(tmp_path / name, harmful)
    for place in (path, tmp_path) if name == "pytorch_model.bin" else (path,):
        with pytest.raises(CheckpointError, match=r"which is not run.*or as safetensors"):
            open_source(place)
    assert not (tmp_path / RAN).exists()
    torch.load(path, weights_only=False)  # it would have
    assert (tmp_path / RAN).exists()


def test_a_plain_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(pickle.dumps(Harmful(tmp_path / RAN), protocol=2))
    with pytest.raises(CheckpointError, match="which is not run"):
        open_source(path)
    assert not (tmp_path / RAN).exists()


def test_harmful_shards_are_refused_when_they_are_needed(tmp_path):
    folder = KINDS["a sharded pickled folder"](tmp_path)
    torch.save({"b.weight": Harmful(tmp_path / RAN)}, folder / "p-2.bin")
    source = open_source(folder)
    for ask in (lambda: source.read("b.weight"), source.verify):
        with pytest.raises(CheckpointError, match="which is not run"):
            ask()
    assert not (tmp_path / RAN).exists()


def bomb() -> object:
    """Ten in ten in ten: little in the file, and more than any memory when it is walked."""
    inner: list[object] = [1]
    for _ in range(60):
        inner = [inner] * 10
    return inner


def test_plain_state_of_modules_in_a_pickled_file_is_read_as_it_is(tmp_path):
    endless: list[object] = [1]
    endless.append(endless)
    state = {"a._extra_state": {"n": (1, None, torch.bfloat16)}, "_extra_state": bomb()}
    content = {**weights(), **state, "b._extra_state": torch.ones(()), "c._extra_state": endless}
    source = open_source(save_pickled(tmp_path / "x.bin", content))
    assert set(source.names) == {*weights(), "b._extra_state"}
    assert source.module_state.keys() == {*state, "c._extra_state"}
    assert source.module_state["a._extra_state"] == state["a._extra_state"]


def huge() -> Tensor:
    return torch.zeros(1).expand(2**40)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.ones(3), "it holds a Tensor, no state dict"),
        ([torch.ones(3)], "it holds a list, no state dict"),
        ({"model": {"a": torch.ones(3)}}, "'model' in it is a dict; only tensors by name"),
        ({"a": 1}, "'a' in it is a int; only tensors by name"),
        ({"a._extra_state": {1, 2}}, "'a._extra_state' in it is a set; only tensors by name"),
        ({"a._extra_state": [torch.ones(2)]}, "'a._extra_state' in it is a list; only tensors"),
        ({1: torch.ones(1)}, "1 in it is a Tensor; only tensors by name"),
        ({"a": torch.ones(2, 2).to_sparse()}, "'a' in it is torch.sparse_coo"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "'a' in it is .*complex128"),
        ({"a": huge()}, "'a' in it is larger than the file"),
        ({"a": torch.ones(2, device="meta")}, "'a' in it is on meta"),
    ],
)
def test_a_pickled_file_of_other_things_is_refused_by_name(tmp_path, content, message):
    with pytest.raises(CheckpointError, match=message):
        open_source(save_pickled(tmp_path / "x.bin", content))


@pytest.mark.parametrize("save", [save_pickled, save_legacy])
def test_a_pickled_file_that_was_cut_is_an_error_of_ours(tmp_path, save):
    path = save(tmp_path / "x.bin", weights())
    size = path.stat().st_size
    for left in (0, 1, size // 3, size // 2, size - 1):
        os.truncate(path, left)
        with pytest.raises(CheckpointError, match="it is damaged"):
            open_source(path)
        path = save(path, weights())


def shards(tmp_path: Path) -> Path:
    return KINDS["a sharded folder"](tmp_path)


def change_index(folder: Path, file: str) -> None:
    path = folder / INDEX_FILE
    content = json.loads(path.read_text())
    content["weight_map"]["a.weight"] = file
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("file", ["../m-1.safetensors", "/etc/passwd", "a/b", "..", ""])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path, file):
    change_index(shards(tmp_path), file)
    with pytest.raises(DamagedCheckpointError, match="not a plain file name"):
        open_source(tmp_path)


def test_an_index_with_a_file_that_is_missing_is_refused(tmp_path):
    (shards(tmp_path) / "m-1.safetensors").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"m-1.safetensors is missing"):
        open_source(tmp_path)


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path):
    change_index(shards(tmp_path), "m-2.safetensors")
    source = open_source(tmp_path)
    with pytest.raises(DamagedCheckpointError, match=r"m-2.*lacks 'a.weight'"):
        source.verify()
    with pytest.raises(DamagedCheckpointError, match=r"m-2.*lacks 'a.weight'"):
        source.facts("a.weight")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {}, "weight_map": {}}',
    ],
)
def test_an_index_of_something_else_is_refused(tmp_path, text):
    (shards(tmp_path) / INDEX_FILE).write_text(text)
    with pytest.raises(DamagedCheckpointError, match="the index cannot be read"):
        open_source(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "grown", "changed"])
def test_damaged_shards_are_named(tmp_path, damage):
    path = shards(tmp_path) / "m-2.safetensors"
    data = path.read_bytes()
    changed = data.replace(b'"shape":[3,4]', b'"shape":[3,5]')
    assert changed != data
    path.write_bytes({"cut": data[:-1], "grown": data + b"x", "changed": changed}[damage])
    source = open_source(tmp_path)
    source.verify(only=["m-1.safetensors"])
    with pytest.raises(DamagedCheckpointError, match=r"m-2\.safetensors"):
        source.verify()


def test_nothing_and_nothing_that_is_known_are_told_apart(tmp_path):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_source(tmp_path / "x")
    (tmp_path / "of_torch").mkdir()
    (tmp_path / "of_torch" / ".metadata").touch()
    with pytest.raises(CheckpointError, match=r"format_utils dcp_to_torch FOLDER FILE\.pt"):
        open_source(tmp_path / "of_torch")
    with pytest.raises(CheckpointError, match=r"it has no weights: none of manifest.json"):
        open_source(tmp_path)
    (tmp_path / "x.npz").write_bytes(b"")
    with pytest.raises(CheckpointError, match="neither a folder nor a file ending in"):
        open_source(tmp_path / "x.npz")
    (tmp_path / "x.safetensors").write_bytes(raw_safetensors(b"{}", b"x"))
    with pytest.raises(DamagedCheckpointError, match=r"x\.safetensors"):
        open_source(tmp_path / "x.safetensors")
