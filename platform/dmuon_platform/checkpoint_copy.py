"""Checkpoints copied to and from remote storage: every byte compared, the manifest last."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem

import dmuon
from dmuon_platform.durable_file import sync, write_whole
from dmuon_platform.errors import CopyError, DamagedSourceError

MANIFEST_FILE = "manifest.json"
_MOST_MANIFEST_BYTES = 64 * 2**20
_CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Place:
    """A folder, wherever it is.

    Attributes:
        text: As it was given.
        files: The file system.
        path: Of the folder in it.
    """

    text: str
    files: FileSystem
    path: str

    @classmethod
    def of(cls, text: str) -> "Place":
        """Return the place of a path, or of a URL such as ``s3://bucket/folder``.

        Raises:
            CopyError: Nobody knows such storage, or it does not answer.
        """
        if not text.partition("://")[2 if "://" in text else 0].strip("/"):
            raise CopyError(
                f"{text!r}: names no folder; write a path, or a URL such as s3://bucket/folder"
            )
        if "://" not in text:
            return cls(text, LocalFileSystem(), str(Path(text).absolute()))
        try:
            return cls(text, *FileSystem.from_uri(text))
        except (ValueError, ImportError, OSError) as error:
            raise CopyError(
                f"{text}: cannot be reached: {error}. Known are paths, file://, s3://, gs://, "
                "hdfs:// and abfs://, and others by way of fsspec as fsspec+NAME://"
            ) from error

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine."""
        return isinstance(self.files, LocalFileSystem)

    def file(self, name: str) -> str:
        """Return the path of a file in it."""
        return f"{self.path.rstrip('/')}/{name}"

    def sizes(self) -> dict[str, int | None]:
        """Return what is in it: sizes of files by name, None for anything else."""
        found = self.files.get_file_info(FileSelector(self.path, allow_not_found=True))
        return {each.base_name: each.size if each.type == FileType.File else None for each in found}


@dataclass(frozen=True)
class CopiedCheckpoint:
    """What was copied.

    Attributes:
        step: Optimizer steps done.
        files: Size in bytes of each by name, the manifest too.
        kept: Names of those that an earlier, interrupted copy had brought already.
    """

    step: int
    files: Mapping[str, int]
    kept: tuple[str, ...]


def copy_checkpoint(source: Place, target: Place) -> CopiedCheckpoint:
    """Copy a checkpoint; what is at ``target`` becomes one when all of it is there.

    Nothing is overwritten. After an interruption the same call goes on; what is there already is
    read and compared.

    Raises:
        CopyError: ``target`` holds something else, or ``source`` is no checkpoint.
        DamagedSourceError: A file of ``source`` is not what was written; the manifest is not
            copied, so ``target`` is no checkpoint.
        OSError: A file system does not do what it should.
    """
    data = _manifest_of(source)
    try:
        manifest = dmuon.Manifest.from_json(data.decode())
    except ValueError as error:
        raise DamagedSourceError(f"{source.text}: its manifest cannot be read: {error}") from error
    sizes = {name: facts.size for name, facts in manifest.files.items()}
    there = target.sizes()
    _check_target(target, there, sizes)
    target.files.create_dir(target.path, recursive=True)
    for name, facts in manifest.files.items():
        if name in there:
            _check_kept(target, name, facts.sha256)
        else:
            _copy_file(source, target, name, facts.sha256)
    if target.sizes() != sizes:
        raise CopyError(f"{target.text}: it does not hold what was written to it; try again")
    if target.is_local:
        write_whole(Path(target.file(MANIFEST_FILE)), data)
    else:
        with target.files.open_output_stream(target.file(MANIFEST_FILE)) as writer:
            writer.write(data)
    kept = tuple(sorted(there))
    return CopiedCheckpoint(manifest.step, sizes | {MANIFEST_FILE: len(data)}, kept)


def _manifest_of(source: Place) -> bytes:
    try:
        with source.files.open_input_stream(source.file(MANIFEST_FILE)) as reader:
            data: bytes = reader.read(_MOST_MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        raise CopyError(
            f"{source.text}: it has no {MANIFEST_FILE}, so it is no checkpoint; give one that is"
        ) from error
    if len(data) > _MOST_MANIFEST_BYTES:
        raise DamagedSourceError(
            f"{source.text}: its manifest is larger than {_MOST_MANIFEST_BYTES} bytes"
        )
    return data


def _check_target(target: Place, there: Mapping[str, int | None], sizes: Mapping[str, int]) -> None:
    if MANIFEST_FILE in there:
        raise CopyError(
            f"{target.text}: a checkpoint is there already; nothing is overwritten, so give "
            "another target"
        )
    for name, size in there.items():
        if name not in sizes or size != sizes[name]:
            raise CopyError(
                f"{target.text}: {name} in it is not one of the files that are copied; nothing is "
                "overwritten, so remove it or give another target"
            )


def _check_kept(target: Place, name: str, sha256: str) -> None:
    with target.files.open_input_stream(target.file(name)) as reader:
        found = hashlib.sha256()
        while chunk := reader.read(_CHUNK_BYTES):
            found.update(chunk)
    if found.hexdigest() != sha256:
        raise CopyError(
            f"{target.text}: {name} is there already and differs from what is copied; nothing is "
            "overwritten, so remove it or give another target"
        )


def _copy_file(source: Place, target: Place, name: str, sha256: str) -> None:
    found = hashlib.sha256()
    try:
        with (
            source.files.open_input_stream(source.file(name)) as reader,
            target.files.open_output_stream(target.file(name)) as writer,
        ):
            while chunk := reader.read(_CHUNK_BYTES):
                found.update(chunk)
                writer.write(chunk)
        if found.hexdigest() != sha256:
            raise DamagedSourceError(
                f"{source.text} is not a whole checkpoint: {name} has changed since it was written "
                "(SHA-256)"
            )
    except BaseException:
        with suppress(OSError):
            target.files.delete_file(target.file(name))
        raise
    if target.is_local:
        sync(Path(target.file(name)))
