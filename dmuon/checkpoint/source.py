"""Where weights are read from: a checkpoint of ours, a Hugging Face folder, or a single file."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from dmuon.checkpoint.assignment import section_of
from dmuon.checkpoint.facts import TensorFacts
from dmuon.checkpoint.file_names import local_path, plain_file
from dmuon.checkpoint.index_file import INDEX_FILE, read_index
from dmuon.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    read_manifest,
    refuse_torch_checkpoint,
)
from dmuon.checkpoint.pickled_file import PickledFile
from dmuon.checkpoint.tensor_file import TensorFile, TensorReader
from dmuon.errors import CheckpointError, DamagedCheckpointError

_SAFETENSORS_FILE = "model.safetensors"
_PICKLED_FILE = "pytorch_model.bin"
_PICKLED_INDEX_FILE = "pytorch_model.bin.index.json"
_PICKLED_ENDINGS = (".bin", ".pt", ".pth")


class Source(ABC):
    """Weights that can be read by name, wherever they are.

    Attributes:
        path: of the folder or file.
        module_state: what ``get_extra_state`` of modules returned beside tensors, as plain data.
    """

    path: Path
    module_state: Mapping[str, Any]

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Of all weights; one that is tied to another may be missing outside of our checkpoints."""

    @property
    @abstractmethod
    def files(self) -> dict[str, int]:
        """The files that `verify` looks at, and how many bytes of each it can compare."""

    @abstractmethod
    def facts(self, name: str) -> TensorFacts:
        """Type and shape of a weight.

        Raises:
            CheckpointError: there is no such weight, or its file cannot be read.
        """

    @abstractmethod
    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read a weight, or some of its rows, on the CPU and in memory of its own.

        Args:
            name: one of ``names``.
            rows: of its first dim, as in ``tensor[rows]`` with a step of 1; None for all.

        Raises:
            CheckpointError: there is no such weight, or its file cannot be read.
        """

    def read_into(self, target: Tensor, name: str, rows: slice | None = None) -> None:
        """Read a weight, or some of its rows, into a tensor of that shape; see `read`."""
        target.copy_(self.read(name, rows))

    @abstractmethod
    def verify(
        self, *, hashes: bool = True, fast: bool = False, only: Collection[str] | None = None
    ) -> None:
        """Check that files are whole, as far as what was written with them tells.

        Args:
            hashes: compare every byte, where there are hashes: in checkpoints of ours.
            fast: by their checksum rather than SHA-256, where there is one.
            only: names of files to look at, of ``files``; by default all.

        Raises:
            DamagedCheckpointError: with the first that is not.
        """


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open whatever weights are at ``path``; nothing in it is ever run.

    Args:
        path: a checkpoint folder of ours (checked against its manifest), a Hugging Face folder, or
            a file: ``.safetensors``, or ``.bin``, ``.pt``, ``.pth`` holding a state dict: tensors
            by name, and plain data where a name ends in ``_extra_state``.

    Raises:
        CheckpointError: there is nothing that can be read.
    """
    path = local_path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.is_file():
        raise CheckpointError(
            path, "there is no such file or folder; give a checkpoint, or a file of weights"
        )
    if path.suffix == ".safetensors":
        return FilesSource.of_one(path, TensorFile)
    if path.suffix in _PICKLED_ENDINGS:
        return FilesSource.of_one(path, PickledFile)
    endings = ", ".join((".safetensors", *_PICKLED_ENDINGS))
    raise CheckpointError(
        path, f"it is neither a folder nor a file ending in {endings}; give one of these"
    )


def _open_folder(folder: Path) -> Source:
    if os.path.lexists(folder / MANIFEST_FILE):
        return CheckpointSource(folder)
    if any(folder.glob("optim-*-of-*.safetensors")):
        read_manifest(folder)  # says that it was never finished
    for file, index, open_file in (
        (_SAFETENSORS_FILE, INDEX_FILE, TensorFile),
        (_PICKLED_FILE, _PICKLED_INDEX_FILE, PickledFile),
    ):
        if (folder / file).is_file():
            return FilesSource.of_one(folder / file, open_file)
        if (folder / index).is_file():
            return FilesSource(folder, _indexed(folder, folder / index), open_file)
    refuse_torch_checkpoint(folder)
    looked_for = (MANIFEST_FILE, _SAFETENSORS_FILE, INDEX_FILE, _PICKLED_FILE, _PICKLED_INDEX_FILE)
    raise CheckpointError(
        folder, f"it has no weights: none of {', '.join(looked_for)}; give the folder they are in"
    )


def _indexed(folder: Path, index: Path) -> dict[str, Path]:
    weight_map = read_index(index)
    paths = {file: plain_file(folder, file) for file in sorted(set(weight_map.values()))}
    return {name: paths[file] for name, file in weight_map.items()}


class CheckpointSource(Source):
    """The weights of a checkpoint of ours, tied ones under each of their names.

    Attributes:
        manifest: of the checkpoint.
        reader: of all its tensors, those of the optimizer too.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.manifest: Manifest = read_manifest(folder)
        self.reader = TensorReader(folder, self.manifest)
        self.module_state = self.manifest.module_state
        self._names = {  # and what each is called in its file
            name: name
            for file, tensors in self.manifest.tensors.items()
            for name in tensors
            if section_of(file) == "model"
        }
        self._names |= self.manifest.tied

    @property
    def names(self) -> list[str]:
        """Of all weights."""
        return list(self._names)

    @property
    def files(self) -> dict[str, int]:
        """All files but the manifest, and their sizes; see `Source.files`."""
        return {name: facts.size for name, facts in self.manifest.files.items()}

    def facts(self, name: str) -> TensorFacts:
        """See `Source.facts`."""
        return self.reader.facts(self._stored(name))

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """See `Source.read`."""
        return self.reader.read(self._stored(name), rows)

    def read_into(self, target: Tensor, name: str, rows: slice | None = None) -> None:
        """See `Source.read_into`."""
        self.reader.read_into(target, self._stored(name), rows)

    def verify(
        self, *, hashes: bool = True, fast: bool = False, only: Collection[str] | None = None
    ) -> None:
        """See `Source.verify`."""
        self.reader.verify(hashes=hashes, fast=fast, only=only)

    def _stored(self, name: str) -> str:
        if name not in self._names:
            raise CheckpointError(self.path, f"it has no weight {name!r}")
        return self._names[name]


class WeightFile(Protocol):
    """One file of weights."""

    facts: Mapping[str, TensorFacts]

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read a weight, or some of its rows."""
        ...


class FilesSource(Source):
    """Weights in files without a manifest. A file is opened when it is first needed.

    Links are followed wherever they lead: the cache of the Hugging Face hub is made of them.

    Args:
        path: of the folder or file.
        path_of: each weight.
        open_file: opens one of the files.
    """

    def __init__(
        self, path: Path, path_of: Mapping[str, Path], open_file: Callable[[Path], WeightFile]
    ) -> None:
        self.path = path
        self.module_state = {}
        self._path_of = path_of
        self._open_file = open_file
        self._opened: dict[Path, WeightFile] = {}

    @classmethod
    def of_one(cls, path: Path, open_file: Callable[[Path], WeightFile]) -> "FilesSource":
        """The weights of a single file."""
        file = open_file(path)
        source = cls(path, dict.fromkeys(file.facts, path), open_file)
        source._opened[path] = file
        if isinstance(file, PickledFile):
            source.module_state = file.module_state
        return source

    @property
    def names(self) -> list[str]:
        """Of all weights."""
        return list(self._path_of)

    @property
    def files(self) -> dict[str, int]:
        """The files with weights, none of whose bytes can be compared; see `Source.files`."""
        return dict.fromkeys(sorted({path.name for path in self._path_of.values()}), 0)

    def facts(self, name: str) -> TensorFacts:
        """See `Source.facts`."""
        return self._file_with(name).facts[name]

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """See `Source.read`."""
        return self._file_with(name).read(name, rows)

    def verify(
        self, *, hashes: bool = True, fast: bool = False, only: Collection[str] | None = None
    ) -> None:
        """See `Source.verify`; there are no hashes, so headers and sizes alone are compared."""
        for name, path in self._path_of.items():
            if only is None or path.name in only:
                self._file_with(name)

    def _file_with(self, name: str) -> WeightFile:
        if name not in self._path_of:
            raise CheckpointError(self.path, f"it has no weight {name!r}")
        path = self._path_of[name]
        if path not in self._opened:
            self._opened[path] = self._open_file(path)
        if name not in self._opened[path].facts:
            raise DamagedCheckpointError(path, f"it lacks {name!r}, which the index says it has")
        return self._opened[path]
