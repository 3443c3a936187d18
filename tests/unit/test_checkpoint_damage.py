"""Whatever happens to a checkpoint, it is named, and never read as if it were whole."""

import json
import os
import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from unit.checkpoint_builders import (
    MODEL_FILES,
    OPTIM_FILE,
    raw_safetensors,
    rewrite_manifest,
    tensors_by_file,
    write,
    write_checkpoint,
)

from dmuon.checkpoint.manifest import MANIFEST_FILE, read_manifest
from dmuon.checkpoint.tensor_file import TensorFile, TensorReader
from dmuon.checkpoint.verification import share_out, verify
from dmuon.errors import CheckpointError, DamagedCheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "step-00001000"
    write_checkpoint(folder)
    return folder


def check(folder: Path, *, hashes: bool = True, fast: bool = False) -> None:
    manifest = read_manifest(folder)
    TensorReader(folder, manifest).verify(hashes=hashes, fast=fast)


def test_a_whole_checkpoint_is_taken_and_read(folder):
    check(folder)
    reader = TensorReader(folder, read_manifest(folder))
    for tensors in tensors_by_file().values():
        for name, tensor in tensors.items():
            assert name in reader
            assert torch.equal(reader.read(name), tensor)
            assert torch.equal(reader.read(name, slice(1, 4)), tensor[1:4])
            assert reader.facts(name).shape == tuple(tensor.shape)
    assert sorted(reader.names) == sorted(n for each in tensors_by_file().values() for n in each)


def test_files_that_the_manifest_does_not_know_do_not_matter(folder):
    (folder / "notes.txt").write_text("mine")
    check(folder)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def swap(folder: Path) -> None:
    one, other = (folder / name for name in MODEL_FILES)
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)


def replace_by(kind: str, path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    if kind == "link":
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
    elif kind == "loop":
        path.unlink()
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.unlink()
        path.symlink_to(elsewhere)
    elif kind == "pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        path.unlink()
        path.mkdir()


DAMAGES = {
    "no folder": (shutil.rmtree, "no manifest.json, as there is no folder"),
    "no manifest": (lambda f: (f / MANIFEST_FILE).unlink(), "writing it was never finished"),
    "an empty manifest": (lambda f: os.truncate(f / MANIFEST_FILE, 0), "manifest.json cannot be"),
    "a cut manifest": (lambda f: cut(f / MANIFEST_FILE), "manifest.json cannot be"),
    "a grown manifest": (lambda f: grow(f / MANIFEST_FILE), "manifest.json cannot be"),
    "a manifest elsewhere": (
        lambda f: replace_by("link", f / MANIFEST_FILE),
        "manifest.json is a link that leaves the folder",
    ),
    "a missing file": (lambda f: (f / OPTIM_FILE).unlink(), f"{OPTIM_FILE} is missing"),
    "a missing small file": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "a cut file": (lambda f: cut(f / OPTIM_FILE), f"{OPTIM_FILE} was cut"),
    "an empty file": (lambda f: os.truncate(f / OPTIM_FILE, 0), f"{OPTIM_FILE} was cut"),
    "a grown file": (lambda f: grow(f / OPTIM_FILE), f"{OPTIM_FILE} has grown"),
    "a grown small file": (lambda f: grow(f / "config.json"), "config.json has grown"),
    "swapped files": (swap, "model-00001-of-00002.safetensors"),
    "a link out": (lambda f: replace_by("link", f / OPTIM_FILE), "is a link that leaves"),
    "a link to itself": (lambda f: replace_by("loop", f / OPTIM_FILE), "is not a file"),
    "a link to nothing": (lambda f: replace_by("dangling", f / OPTIM_FILE), "is not a file"),
    "a pipe": (lambda f: replace_by("pipe", f / OPTIM_FILE), "is not a file"),
    "a folder": (lambda f: replace_by("folder", f / OPTIM_FILE), "is not a file"),
}


@pytest.mark.parametrize("hashes", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_without_reading_contents_too(folder, damage, hashes):
    spoil, message = DAMAGES[damage]
    spoil(folder)
    with pytest.raises(DamagedCheckpointError, match=message) as raised:
        check(folder, hashes=hashes)
    assert raised.value.path == folder


def test_a_link_within_the_folder_is_followed(folder):
    (folder / OPTIM_FILE).rename(folder / "x")
    (folder / OPTIM_FILE).symlink_to("x")
    check(folder)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("file", [MANIFEST_FILE, *MODEL_FILES, OPTIM_FILE, "config.json"])
def test_a_single_changed_byte_anywhere_is_found(folder, file, fast):
    rng = random.Random(0)
    path = folder / file
    whole = path.read_bytes()
    places = rng.sample(range(len(whole)), min(len(whole), 150))
    for place in places:
        spoilt = bytearray(whole)
        spoilt[place] ^= rng.randrange(1, 256)
        path.write_bytes(spoilt)
        with pytest.raises(DamagedCheckpointError, match=file) as raised:
            check(folder, fast=fast)
        assert raised.value.path == folder


def in_file(key: str, value: str | None):
    """What changes a manifest so; None takes the key away."""

    def change(content):
        facts = content["files"][OPTIM_FILE]
        facts.pop(key)
        facts.update({} if value is None else {key: value})

    return change


def test_fast_compares_the_checksum_and_otherwise_the_sha256_is_compared(folder):
    rewrite_manifest(folder, in_file("sha256", "0" * 64))
    check(folder, fast=True)
    with pytest.raises(DamagedCheckpointError, match=rf"{OPTIM_FILE} has changed .*\(SHA-256\)"):
        check(folder)
    rewrite_manifest(folder, in_file("sums", "0" * 64))
    with pytest.raises(DamagedCheckpointError, match=rf"{OPTIM_FILE} has changed .*\(checksum\)"):
        check(folder, fast=True)


def test_where_a_manifest_has_no_checksum_the_sha256_is_compared(folder):
    rewrite_manifest(folder, in_file("sums", None))
    check(folder, fast=True)
    path = folder / OPTIM_FILE
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(DamagedCheckpointError, match=rf"{OPTIM_FILE} has changed .*\(SHA-256\)"):
        check(folder, fast=True)


def test_each_file_is_looked_at_by_one_rank_and_all_read_about_as_much():
    files = {"a": 5, "b": 3, "c": 3, "d": 0, "e": 0}
    assert share_out(files, 2) == [["a", "d", "e"], ["b", "c"]]
    assert share_out({"a": 0, "b": 0}, 3) == [["a"], ["b"], []]


def test_the_files_to_look_at_can_be_shared_out(folder):
    manifest = read_manifest(folder)
    grow(folder / OPTIM_FILE)
    reader = TensorReader(folder, manifest)
    reader.verify(only=[*MODEL_FILES, "config.json"])
    verify(folder, manifest, only=MODEL_FILES)
    for look in (reader.verify, lambda only: verify(folder, manifest, only=only)):
        with pytest.raises(DamagedCheckpointError, match="has grown"):
            look(only=[OPTIM_FILE])
    with pytest.raises(CheckpointError, match="'other' is not one of its files"):
        reader.verify(only=["other"])


def test_a_tensor_that_is_not_there_is_named(folder):
    reader = TensorReader(folder, read_manifest(folder))
    for ask in (reader.read, reader.facts):
        with pytest.raises(CheckpointError, match="it has no tensor 'x'"):
            ask("x")


@pytest.mark.parametrize(
    ("key", "value"), [("dtype", "I32"), ("shape", [4, 7]), ("shape", [28]), ("shape", [6, 4])]
)
def test_tensors_are_compared_with_the_manifest_when_read(folder, key, value):
    tensors = ("tensors", MODEL_FILES[1], "down.weight")

    def change(content):
        place = content
        for part in tensors:
            place = place[part]
        place[key] = value

    rewrite_manifest(folder, change)
    reader = TensorReader(folder, read_manifest(folder))
    with pytest.raises(DamagedCheckpointError, match=r"model-00002.*'down.weight' is .*F32"):
        reader.read("down.weight")
    assert torch.equal(reader.read("up.weight"), tensors_by_file()[MODEL_FILES[0]]["up.weight"])


def test_a_file_cut_after_it_was_opened_is_an_error_and_not_the_end_of_the_process(folder):
    reader = TensorReader(folder, read_manifest(folder))
    reader.read("embed.weight")
    os.truncate(folder / MODEL_FILES[0], 300)
    with pytest.raises(DamagedCheckpointError, match=r"ends within up.weight") as raised:
        reader.read("up.weight")
    assert raised.value.path == folder


def test_a_header_that_has_changed_is_named_with_its_checkpoint(folder):
    path = folder / MODEL_FILES[0]
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"BF17"'))
    with pytest.raises(DamagedCheckpointError, match=f"{path.name}: .*BF17") as raised:
        check(folder, hashes=False)
    assert raised.value.path == folder


def header(**tensors: object) -> bytes:
    return json.dumps(tensors).encode()


def entry(
    dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


FOUR, EIGHT = b"\0" * 4, b"\0" * 8
HEADERS = {
    "an empty file": b"",
    "half a length": b"\0\0\0",
    "a length alone": (2).to_bytes(8, "little"),
    "a header longer than the file": (1000).to_bytes(8, "little") + header(a=entry()) + FOUR,
    "an absurd length": (2**64 - 1).to_bytes(8, "little") + header(a=entry()) + FOUR,
    "no JSON": raw_safetensors(b"x" * 16, FOUR),
    "a list": raw_safetensors(b"[]", b""),
    "an entry that is no dict": raw_safetensors(header(a=[1]), FOUR),
    "overlapping": raw_safetensors(header(a=entry(), b=entry(offsets=(2, 6))), FOUR + b"\0\0"),
    "the same bytes twice": raw_safetensors(header(a=entry(), b=entry()), FOUR),
    "an overlap and a gap that cancel out": raw_safetensors(
        header(a=entry(), b=entry(offsets=(2, 6)), c=entry(shape=(2,), offsets=(8, 10))),
        EIGHT + b"\0\0",
    ),
    "offsets that say less than the shape": raw_safetensors(header(a=entry(shape=(8,))), EIGHT),
    "a gap": raw_safetensors(header(a=entry(), b=entry(offsets=(6, 10))), EIGHT + b"\0\0"),
    "a gap before the first": raw_safetensors(header(a=entry(offsets=(4, 8))), EIGHT),
    "offsets after the end": raw_safetensors(header(a=entry(shape=(8,), offsets=(0, 8))), FOUR),
    "offsets that go back": raw_safetensors(header(a=entry(offsets=(4, 0))), FOUR),
    "negative offsets": raw_safetensors(header(a=entry(offsets=(-4, 0))), FOUR),
    "absurd offsets": raw_safetensors(header(a=entry(offsets=(0, 10**30))), FOUR),
    "one offset": raw_safetensors(header(a=entry(offsets=(0,))), FOUR),
    "fractional offsets": raw_safetensors(header(a=entry(offsets=(0, 4.0))), FOUR),
    "more bytes than the shape": raw_safetensors(header(a=entry(shape=(3,))), FOUR),
    "fewer bytes than the shape": raw_safetensors(header(a=entry(shape=(2, 4))), FOUR),
    "fewer bytes than the dtype": raw_safetensors(header(a=entry(dtype="F32")), FOUR),
    "an absurd shape": raw_safetensors(header(a=entry(shape=(2**62, 2**62))), FOUR),
    "an absurd empty shape": raw_safetensors(
        header(a=entry(shape=(0, 2**62, 2**62), offsets=(0, 0))), b""
    ),
    "a negative shape": raw_safetensors(header(a=entry(shape=(-2, -2))), FOUR),
    "an unknown dtype": raw_safetensors(header(a=entry(dtype="F4096")), FOUR),
    "bytes after the last": raw_safetensors(header(a=entry()), EIGHT),
    "a name twice": raw_safetensors(header(a=entry())[:-1] + b"," + header(a=entry())[1:], FOUR),
    "metadata that is no text": raw_safetensors(header(__metadata__={"a": 1}, a=entry()), FOUR),
    "nested deeply": raw_safetensors(b"[" * 100_000, FOUR),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_file_that_is_no_whole_safetensors_file_is_refused(tmp_path, name):
    path = tmp_path / "x.safetensors"
    path.write_bytes(HEADERS[name])
    with pytest.raises(DamagedCheckpointError) as raised:
        TensorFile(path)
    assert raised.value.path == path
    if name not in ("a name twice", "fractional offsets", "an absurd empty shape"):
        with pytest.raises(Exception, match=r".*"), safe_open(path, "pt"):  # they agree
            pass


def test_what_those_files_were_made_of_is_a_good_file(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw_safetensors(header(a=entry(), b=entry(offsets=(4, 8))), EIGHT))
    assert TensorFile(path).facts.keys() == {"a", "b"}


def test_a_header_of_more_than_100_megabytes_is_not_read(tmp_path):
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little") + b"{")
        file.truncate(300_000_000)  # sparse
    with pytest.raises(DamagedCheckpointError, match="header of 200000000 bytes"):
        TensorFile(path)


@pytest.fixture(scope="module")
def good_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "x.safetensors"
    write(path, {"a": torch.ones(3), "b": torch.ones(2, 2).bfloat16(), "c": torch.empty(0, 5)})
    return path


@settings(max_examples=200)
@given(place=st.integers(0, 10**6), put=st.binary(max_size=4), drop=st.integers(0, 4))
def test_any_change_of_a_file_is_refused_or_read_and_nothing_else(good_file, place, put, drop):
    whole = good_file.read_bytes()
    place %= len(whole)
    path = good_file.with_name("spoilt.safetensors")
    path.write_bytes(whole[:place] + put + whole[place + drop :])
    with suppress(DamagedCheckpointError):
        file = TensorFile(path)
        for name, facts in file.facts.items():
            assert tuple(file.read(name).shape) == facts.shape
