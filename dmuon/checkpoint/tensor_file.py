"""Safetensors files: written as a stream, read tensor by tensor and row by row.

Reading is not done by mapping a file into memory, as the safetensors library does: a file that is
cut meanwhile would end the process, where an ordinary read names it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dmuon.checkpoint.durable_file import whole_file
from dmuon.checkpoint.facts import FileFacts, TensorFacts
from dmuon.checkpoint.file_names import file_in
from dmuon.checkpoint.header import Span, file_order, make_header, read_header
from dmuon.checkpoint.manifest import Manifest
from dmuon.checkpoint.verification import verify
from dmuon.errors import CheckpointError, DamagedCheckpointError, SetupError

CHUNK_BYTES = 4 * 2**20
"""The most that is copied at once while writing."""


def write_tensors(
    path: Path, facts: Mapping[str, TensorFacts], fetch: Callable[[str], Tensor]
) -> FileFacts:
    """Write a safetensors file that appears under ``path`` when it is whole and on the disk.

    No more than one tensor is held here at a time, and at most `CHUNK_BYTES` are copied at once.

    Args:
        path: in a folder that is there.
        facts: of every tensor, by name.
        fetch: called with each name once, in the order of `file_order`; ``tensors.pop`` of a dict
            gives memory back as soon as it is written. Any device, contiguous or not.

    Raises:
        CheckpointError: a tensor is not what ``facts`` says; nothing is left of the file.
        OSError: such as on a full disk; nothing is left of the file.
    """
    try:
        header = make_header(facts)
    except ValueError as error:
        raise CheckpointError(path, f"it cannot be written: {error}") from None
    with whole_file(path) as file:
        file.write(header)
        for name in file_order(facts):
            tensor = fetch(name).detach()
            _check(path, name, facts[name], tensor)
            for chunk in _chunks(tensor):
                file.write(_bytes_of(chunk.cpu()))
    return file.facts()


def _check(path: Path, name: str, facts: TensorFacts, tensor: Tensor) -> None:
    if (tensor.dtype, tuple(tensor.shape)) != (facts.torch_dtype, facts.shape):
        raise CheckpointError(
            path,
            f"{name} was announced as {facts.dtype} {list(facts.shape)}, but is {tensor.dtype} "
            f"{list(tensor.shape)}",
        )


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """The values of a tensor in their order, contiguous, a bounded number at a time."""
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(max(1, CHUNK_BYTES // tensor.itemsize))
    elif tensor.nbytes <= CHUNK_BYTES:
        yield tensor.contiguous()
    else:
        row_bytes = tensor.nbytes // len(tensor)
        for rows in tensor.split(max(1, CHUNK_BYTES // row_bytes)):
            yield from _chunks(rows if len(rows) > 1 else rows[0])


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    plain = tensor.resolve_conj().resolve_neg()  # bits that say how to read the memory
    return memoryview(plain.view(-1).view(torch.uint8).numpy().data)


class TensorFile:
    """A safetensors file, of which any tensor can be read, or some of its rows.

    Args:
        path: of the file.

    Raises:
        DamagedCheckpointError: it is no whole safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._spans = read_header(path)
        self.facts: Mapping[str, TensorFacts] = {
            name: span.facts for name, span in self._spans.items()
        }
        """Of every tensor, in the order of the file."""

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read a tensor, or some of its rows, and nothing else.

        Args:
            name: a key of ``facts``.
            rows: of its first dim, as in ``tensor[rows]`` with a step of 1; None for all.

        Raises:
            DamagedCheckpointError: the file has been cut since it was opened.
        """
        span = self._spans[name]
        _, shape = _part(name, span, rows)
        tensor = torch.empty(shape, dtype=span.facts.torch_dtype)
        self.read_into(tensor, name, rows)
        return tensor

    def read_into(self, target: Tensor, name: str, rows: slice | None = None) -> None:
        """Read a tensor, or some of its rows, to where it belongs.

        Args:
            target: of the right shape, on any device and of any type.
            name: a key of ``facts``.
            rows: as in `read`.

        Raises:
            DamagedCheckpointError: the file has been cut since it was opened.
            SetupError: the shape is another.
        """
        span = self._spans[name]
        begin, shape = _part(name, span, rows)
        if tuple(target.shape) != shape:
            raise SetupError(f"{name} has shape {shape} there, {tuple(target.shape)} here")
        if not _lies_as_in_file(target, span.facts):
            target.copy_(self.read(name, rows))
            return
        torch.autograd.graph.increment_version(target)  # as whatever writes into a tensor does
        left = _bytes_of(target)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(begin)
                while left:
                    count = file.readinto(left)
                    if not count:
                        raise DamagedCheckpointError(self.path, f"it ends within {name}")
                    left = left[count:]
        except OSError as error:
            raise DamagedCheckpointError(self.path, f"{name} cannot be read: {error}") from error


def _lies_as_in_file(tensor: Tensor, facts: TensorFacts) -> bool:
    is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return is_plain and tensor.device.type == "cpu" and tensor.dtype == facts.torch_dtype


def _part(name: str, span: Span, rows: slice | None) -> tuple[int, tuple[int, ...]]:
    """Where some rows of a tensor begin in its file, and their shape."""
    shape = span.facts.shape
    if rows is None:
        return span.begin, shape
    first, count = row_range(name, span.facts, rows)
    row_bytes = span.facts.num_bytes // max(shape[0], 1)
    return span.begin + first * row_bytes, (count, *shape[1:])


def row_range(name: str, facts: TensorFacts, rows: slice) -> tuple[int, int]:
    """The first row that a slice takes, and how many.

    Raises:
        SetupError: the tensor has no rows, or the slice leaves some out.
    """
    if not facts.shape:
        raise SetupError(f"{name} has no dims, so it has no rows; read it with rows=None")
    first, last, step = rows.indices(facts.shape[0])
    if step != 1:
        raise SetupError(f"{name}: rows are read with a step of 1, not {step}")
    return first, max(last - first, 0)


class TensorReader:
    """The tensors of a checkpoint: read by name, from any of its files.

    A file is looked at when something of it is read for the first time.

    Args:
        folder: the checkpoint.
        manifest: its manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._manifest = manifest
        self._tensors = manifest.tensors
        self._file_of = {
            name: file for file, tensors in manifest.tensors.items() for name in tensors
        }
        self._files: dict[str, TensorFile] = {}

    @property
    def names(self) -> list[str]:
        """Of all tensors, file by file."""
        return list(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def facts(self, name: str) -> TensorFacts:
        """Type and shape, by the manifest."""
        return self._tensors[self._place(name)][name]

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read a tensor, or some of its rows, and nothing else.

        Args:
            name: one of ``names``.
            rows: of its first dim, as in ``tensor[rows]`` with a step of 1; None for all.

        Raises:
            CheckpointError: there is no such tensor.
            DamagedCheckpointError: its file is not what the manifest says.
        """
        file = self._place(name)
        with self._named(file):
            return self._open(file).read(name, rows)

    def read_into(self, target: Tensor, name: str, rows: slice | None = None) -> None:
        """Read a tensor, or some of its rows, to where it belongs; see `TensorFile.read_into`.

        Raises:
            CheckpointError: there is no such tensor.
            DamagedCheckpointError: its file is not what the manifest says.
        """
        file = self._place(name)
        with self._named(file):
            self._open(file).read_into(target, name, rows)

    def verify(
        self, *, hashes: bool = True, fast: bool = False, only: Collection[str] | None = None
    ) -> None:
        """Compare files with the manifest: sizes, headers and, unless told not to, every byte.

        Args:
            hashes: read every file and compare its SHA-256 too.
            fast: compare the checksum `WordSums` instead, where the manifest has it.
            only: names of the files to look at; by default all. So ranks can share the work.

        Raises:
            DamagedCheckpointError: with the first file that is missing, cut, grown or changed.
        """
        verify(self.folder, self._manifest, hashes=hashes, fast=fast, only=only)
        for file in self._tensors:
            if only is None or file in only:
                with self._named(file):
                    self._open(file)

    def _place(self, name: str) -> str:
        if name not in self._file_of:
            raise CheckpointError(self.folder, f"it has no tensor {name!r}")
        return self._file_of[name]

    @contextmanager
    def _named(self, file: str) -> Iterator[None]:
        """Damage of a file is damage of the checkpoint."""
        try:
            yield
        except DamagedCheckpointError as damage:
            if damage.path == self.folder:
                raise
            raise DamagedCheckpointError(self.folder, f"{file}: {damage.reason}") from damage

    def _open(self, file: str) -> TensorFile:
        if file not in self._files:
            opened = TensorFile(file_in(self.folder, file))
            if opened.facts != self._tensors[file]:
                changed = _first_difference(self._tensors[file], opened.facts)
                reason = f"it does not hold what the manifest says: {changed}"
                raise DamagedCheckpointError(opened.path, reason)
            self._files[file] = opened
        return self._files[file]


def _first_difference(
    announced: Mapping[str, TensorFacts], found: Mapping[str, TensorFacts]
) -> str:
    for name in sorted(announced.keys() | found.keys()):
        if announced.get(name) != found.get(name):
            return f"{name!r:.100} is {found.get(name)}, not {announced.get(name)}"
    return "their order"
