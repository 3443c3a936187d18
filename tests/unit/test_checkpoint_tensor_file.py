"""Safetensors files: what is written is what everybody reads, a piece at a time."""

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from unit.checkpoint_builders import write

from dmuon.checkpoint import tensor_file
from dmuon.checkpoint.durable_file import HashedFile
from dmuon.checkpoint.facts import DTYPES, TensorFacts, facts_of
from dmuon.checkpoint.tensor_file import TensorFile, write_tensors
from dmuon.errors import CheckpointError, SetupError

SHAPES = [(), (0,), (1,), (3,), (5, 4), (0, 4), (4, 0), (2, 3, 5), (1, 1, 1, 7)]


def values(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bits that the type can have."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        return (bits > 127).reshape(shape)
    return bits.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_same_bits(was: torch.Tensor, now: torch.Tensor) -> None:
    assert (was.dtype, was.shape, bits(was)) == (now.dtype, now.shape, bits(now))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_type_and_shape_comes_back_here_and_from_safetensors(path, dtype):
    tensors = {f"t{shape}": values(dtype, shape) for shape in SHAPES}
    write(path, tensors)
    ours, theirs = TensorFile(path), load_file(path)
    assert ours.facts.keys() == theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same_bits(tensor, theirs[name])
        assert_same_bits(tensor, ours.read(name))
        assert ours.facts[name] == facts_of(tensor)


def test_all_types_of_torch_that_hold_floats_ints_or_bools_can_be_written():
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    numbers = {dtype for dtype in found if dtype.is_floating_point and dtype.itemsize <= 8}
    numbers |= {getattr(torch, f"{sign}int{n}") for sign in ("", "u") for n in (8, 16, 32, 64)}
    packed = {torch.float4_e2m1fn_x2}  # two values in a byte
    assert numbers | {torch.bool} - packed <= set(DTYPES.values()) | packed


def test_types_mixed_in_one_file_are_aligned_and_without_gaps(path):
    tensors = {
        f"{name}{size}": values(dtype, (size,)) for name, dtype in DTYPES.items() for size in (1, 3)
    }
    write(path, tensors)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        for name, tensor in tensors.items():
            assert_same_bits(tensor, file.get_tensor(name))
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, _ = entry["data_offsets"]
            assert begin % min(tensors[name].itemsize, 8) == 0


@pytest.mark.parametrize("name", ["x" * length for length in range(1, 10)])
def test_values_begin_at_a_multiple_of_8_bytes(path, name):
    write(path, {name: torch.ones(3)})
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    assert torch.equal(load_file(path)[name], torch.ones(3))


def test_what_safetensors_writes_is_read(path):
    tensors = {f"t{shape}": values(torch.bfloat16, shape) for shape in SHAPES}
    save_file(tensors, path, metadata={"format": "pt", "more": "text"})
    file = TensorFile(path)
    for name, tensor in tensors.items():
        assert_same_bits(tensor, file.read(name))


def strided() -> dict[str, torch.Tensor]:
    base = values(torch.int32, (6, 8, 10))
    return {
        "transposed": base.transpose(0, 2),
        "every other row": base[::2],
        "every other column": base[:, :, ::2],
        "expanded": base[:1].expand(9, 8, 10),
        "one row of a permuted one": base.permute(2, 0, 1)[:1],
        "offset": base.view(-1)[3:400],
        "a gap of a 1-dim one": base.view(-1)[::3],
        "conjugate": torch.view_as_complex(torch.randn(5, 2)).conj(),
        "negative": torch.view_as_complex(torch.randn(5, 2)).conj().imag,
        "a gradient": torch.randn(3, 3, requires_grad=True),
    }


@pytest.mark.parametrize("chunk", [1, 24, 100, 2**20])
def test_memory_layout_and_chunk_size_do_not_matter(path, monkeypatch, chunk):
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", chunk)
    tensors = strided()
    write(path, tensors)
    theirs = load_file(path)
    for name, tensor in tensors.items():
        assert torch.equal(theirs[name], tensor), name


def test_values_are_read_to_where_they_belong_whatever_the_memory_layout(path):
    tensors = {name: tensor for name, tensor in strided().items() if name != "expanded"}
    expected = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    write(path, tensors)
    file = TensorFile(path)
    for name, tensor in tensors.items():
        target = tensor.detach().zero_()
        version = target._version
        file.read_into(target, name)
        assert torch.equal(target, expected[name]), name
        assert target._version > version, name  # autograd and a save beside it must see it


@pytest.mark.parametrize("chunk", [24, 100])
def test_no_piece_is_larger_than_a_chunk(path, monkeypatch, chunk):
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", chunk)
    pieces: list[int] = []
    plain_write = HashedFile.write

    def noting_write(self: HashedFile, data: bytes | memoryview) -> None:
        pieces.append(len(data))
        plain_write(self, data)

    monkeypatch.setattr(HashedFile, "write", noting_write)
    write(path, strided())
    assert max(pieces[1:]) <= chunk  # the first is the header


def test_the_hash_is_that_of_the_file(path):
    facts = write(path, {"a": values(torch.float32, (100, 100)), "b": values(torch.bool, (7,))})
    data = path.read_bytes()
    assert (facts.size, facts.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_values_are_on_the_disk_before_the_name_is_and_that_before_it_returns(path, monkeypatch):
    synced: list[tuple[bool, bool]] = []
    fsync = os.fsync

    def noting_fsync(handle: int) -> None:
        fsync(handle)
        synced.append((stat.S_ISDIR(os.fstat(handle).st_mode), path.exists()))

    monkeypatch.setattr(os, "fsync", noting_fsync)
    write(path, {"x": torch.ones(3)})
    assert synced == [(False, False), (True, True)]


def test_a_file_may_be_without_tensors(path):
    write(path, {})
    assert load_file(path) == {}
    assert TensorFile(path).facts == {}


def test_fetch_is_called_once_each_so_memory_can_be_given_back(path):
    tensors = {"a": torch.ones(3).bfloat16(), "b": torch.ones(3), "c": torch.ones(3)}
    facts = {name: facts_of(tensor) for name, tensor in tensors.items()}
    fetched: list[str] = []

    def pop(name: str) -> torch.Tensor:
        fetched.append(name)
        return tensors.pop(name)

    write_tensors(path, facts, pop)
    assert fetched == tensor_file.file_order(facts) == ["b", "c", "a"]
    assert not tensors


@pytest.mark.parametrize("shape", [(5,), (5, 4), (5, 2, 3), (5, 0), (0, 4), (1, 4)])
def test_rows_are_those_of_the_tensor(path, shape):
    tensor = values(torch.int16, shape)
    write(path, {"before": torch.ones(3), "x": tensor, "after": torch.ones(3).bool()})
    file = TensorFile(path)
    bounds = [None, *range(-7, 8)]
    for first, last in product(bounds, bounds):
        rows = slice(first, last)
        assert_same_bits(tensor[rows], file.read("x", rows))


def test_rows_are_those_that_safetensors_reads(path):
    tensor = values(torch.bfloat16, (9, 4))
    write(path, {"before": torch.ones(3), "x": tensor})
    with safe_open(path, "pt") as file:
        theirs = file.get_slice("x")[2:7]
    assert_same_bits(theirs, TensorFile(path).read("x", slice(2, 7)))


@pytest.mark.parametrize("rows", [slice(None, None, 2), slice(None, None, -1)])
def test_a_slice_that_leaves_rows_out_is_refused(path, rows):
    write(path, {"x": torch.ones(4)})
    with pytest.raises(SetupError, match="x: rows are read with a step of 1"):
        TensorFile(path).read("x", rows)


def test_rows_of_a_tensor_without_dims_are_refused(path):
    write(path, {"x": torch.tensor(1.0)})
    with pytest.raises(SetupError, match="x has no dims"):
        TensorFile(path).read("x", slice(0, 1))


@pytest.mark.parametrize("wrong", [torch.ones(2, 4), torch.ones(4, 2).double()])
def test_a_tensor_that_is_not_what_was_announced_leaves_no_file(path, wrong):
    facts = {"first": TensorFacts("F32", (2,)), "x": TensorFacts("F32", (4, 2))}
    tensors = {"first": torch.ones(2), "x": wrong}
    with pytest.raises(CheckpointError, match=r"x was announced as F32 \[4, 2\]"):
        write_tensors(path, facts, tensors.__getitem__)
    assert not list(path.parent.iterdir())


def test_a_full_disk_leaves_what_was_there_before(path, monkeypatch):
    write(path, {"x": torch.zeros(3)})

    def full(self: HashedFile, data: bytes | memoryview) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(HashedFile, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write(path, {"x": torch.ones(3)})
    assert list(path.parent.iterdir()) == [path]
    assert torch.equal(load_file(path)["x"], torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float4_e2m1fn_x2])
def test_a_type_that_no_file_holds_is_refused_by_name(dtype):
    with pytest.raises(ValueError, match=str(dtype)):
        facts_of(torch.empty(2, dtype=dtype))


def test_the_name_of_the_metadata_is_refused(path):
    with pytest.raises(CheckpointError, match="__metadata__"):
        write(path, {"__metadata__": torch.ones(1)})


MEMORY = r"""
import re, sys
from pathlib import Path
import torch
from dmuon.checkpoint.facts import facts_of
from dmuon.checkpoint.tensor_file import TensorFile, write_tensors

def peak():
    status = Path("/proc/self/status").read_text()  # getrusage has the peak of the parent too
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024

path = Path(sys.argv[1])
some = torch.ones(3, 3).t()
write_tensors(path, {"x": facts_of(some)}, {"x": some}.get)  # what is loaded at first use
tensors = {str(i): torch.ones(2_500_000) for i in range(20)}
tensors["strided"] = torch.ones(5000, 5000).t()
facts = {name: facts_of(tensor) for name, tensor in tensors.items()}
before = peak()
write_tensors(path, facts, tensors.__getitem__)
wrote = peak()
TensorFile(path).read("strided", slice(10, 20))
print(path.stat().st_size / 2**20, wrote - before, peak() - wrote)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_memory_is_bounded_by_chunks_while_writing_and_by_rows_while_reading(path):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, path], cwd=root, capture_output=True, text=True, check=True
    )
    size, for_writing, for_reading = map(float, done.stdout.split())
    path.unlink()
    assert size > 280
    assert for_writing < 60  # a few chunks; the one strided tensor has 95
    assert for_reading < 10
