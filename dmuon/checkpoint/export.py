"""The weights of a checkpoint as others read them: a Hugging Face folder, or one file. Local.

Everything is written under a temporary name, read back and compared before it gets its own.
"""

import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmuon.checkpoint.description import checkpoint_folder
from dmuon.checkpoint.durable_file import sync, write_file
from dmuon.checkpoint.facts import TensorFacts, facts_of
from dmuon.checkpoint.file_names import local_path
from dmuon.checkpoint.header import read_header
from dmuon.checkpoint.index_file import INDEX_FILE, index_json
from dmuon.checkpoint.plain_json import encode
from dmuon.checkpoint.source import CheckpointSource, open_source
from dmuon.checkpoint.tensor_file import write_tensors
from dmuon.errors import CheckpointError, SetupError

_PICKLED_ENDINGS = (".pt", ".pth", ".bin")
_ENDINGS = (*_PICKLED_ENDINGS, ".safetensors")
MAX_SHARD_BYTES = 5 * 2**30
_COMPARED_BYTES = 64 * 2**20  # of one tensor, at a time


@dataclass(frozen=True)
class ExportedWeights:
    """What was written, and read back since.

    Attributes:
        path: of the folder or file.
        files: size in bytes of each by name.
        num_tensors: weights in them.
        num_bytes: of their values; what is tied is counted once.
    """

    path: Path
    files: Mapping[str, int]
    num_tensors: int
    num_bytes: int


def export_weights(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ExportedWeights:
    """Write the weights of a checkpoint where other programs read them.

    At most one tensor is in memory at a time. Tied weights are written once, under the name that
    comes first in the model, as ``transformers`` does. A file for ``torch.load`` has them under
    each name, sharing their memory, and what modules return from ``get_extra_state``, so that it
    loads with ``strict=True``; while it is made, it takes its size twice on the disk.

    Args:
        path: the folder of a checkpoint. Every byte that is used is compared with what was written.
        target: a new file ending in ``.safetensors``, or in ``.pt``, ``.pth`` or ``.bin`` for
            ``torch.load(..., weights_only=True)``, or else a new folder, which will be a Hugging
            Face checkpoint: weights, their index, and the small files that are in the checkpoint,
            such as ``config.json``. A name that ends in a dot and letters is that of
            a file; a folder of such a name must be there, and be empty.
        max_shard_bytes: of values in one file of the folder; a larger tensor has one for itself.

    Returns:
        What was written; it has been read back and compared.

    Raises:
        CheckpointError: ``target`` is in use, or there is no checkpoint; nothing was changed.
        DamagedCheckpointError: the checkpoint is not whole.
        OSError: such as on a full disk; nothing is left of the target.
    """
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise SetupError(
            f"max_shard_bytes must be a whole number of at least 1, got {max_shard_bytes!r}"
        )
    target = local_path(target)
    _check_unused(target)
    source = _open(path)
    with _new(target) as temporary:
        if target.suffix in _PICKLED_ENDINGS:
            _write_pickled(source, temporary)
        elif target.suffix in _ENDINGS:
            _write_file(source, temporary, _stored(source))
        else:
            _write_folder(source, temporary, max_shard_bytes)
        _compare(source, temporary, target)
    stored = _stored(source)
    paths = sorted(target.iterdir()) if target.is_dir() else [target]
    return ExportedWeights(
        path=target,
        files={each.name: each.stat().st_size for each in paths},
        num_tensors=len(stored),
        num_bytes=sum(facts.num_bytes for facts in stored.values()),
    )


def _open(path: str | os.PathLike[str]) -> CheckpointSource:
    source = CheckpointSource(checkpoint_folder(path))
    unused = {file for file in source.manifest.tensors if file.startswith("optim-")}
    source.verify(only=[file for file in source.files if file not in unused])
    return source


def _check_unused(target: Path) -> None:
    is_empty_folder = target.is_dir() and not any(target.iterdir())
    if os.path.lexists(target) and not (is_empty_folder and target.suffix not in _ENDINGS):
        raise CheckpointError(
            target,
            "it is there already; nothing is overwritten, give a new path, or remove it first",
        )
    if target.suffix[1:].isalpha() and target.suffix not in _ENDINGS and not is_empty_folder:
        raise CheckpointError(
            target,
            f"nothing is written as {target.suffix}: a file ends in one of {', '.join(_ENDINGS)}; "
            "for a folder leave the ending out, or make it first",
        )


@contextmanager
def _new(target: Path) -> Iterator[Path]:
    """A path for what becomes ``target`` at the end; when the body raises, nothing is left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # the ending tells what it is, so it stays the last part of the name
    temporary = target.with_name(f".{target.stem}.{os.getpid()}.tmp{target.suffix}")
    _remove(temporary)
    try:
        yield temporary
        _check_unused(target)  # it may have come up meanwhile
        temporary.rename(target)
    except BaseException:
        _remove(temporary)
        raise
    sync(target.parent)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):
            path.unlink()


def _stored(source: CheckpointSource) -> dict[str, TensorFacts]:
    """The weights that the checkpoint has in its files, in their order."""
    return {n: source.facts(n) for n in source.names if n not in source.manifest.tied}


def _write_file(source: CheckpointSource, path: Path, facts: Mapping[str, TensorFacts]) -> None:
    write_tensors(path, facts, source.read)


def _write_folder(source: CheckpointSource, folder: Path, max_shard_bytes: int) -> None:
    folder.mkdir()
    shards = _shards(_stored(source), max_shard_bytes)
    tensors: dict[str, dict[str, TensorFacts]] = {}
    for number, shard in enumerate(shards, start=1):
        only = len(shards) == 1
        name = (
            "model.safetensors" if only else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        tensors[name] = shard
        _write_file(source, folder / name, shard)
    if len(shards) > 1:
        write_file(folder / INDEX_FILE, index_json(tensors))
    for name in _small_files(source):
        shutil.copyfile(source.path / name, folder / name)
        sync(folder / name)
    sync(folder)


def _small_files(source: CheckpointSource) -> list[str]:
    """The files that the caller of ``save_checkpoint`` gave."""
    own = {INDEX_FILE, *source.manifest.tensors}
    names = [name for name in source.files if name not in own]
    return [name for name in names if not name.endswith(".safetensors")]


def _shards(facts: Mapping[str, TensorFacts], most: int) -> list[dict[str, TensorFacts]]:
    """Divide weights, in their order, into as few files as their order allows."""
    shards: list[dict[str, TensorFacts]] = [{}]
    used = 0
    for name, each in facts.items():
        if shards[-1] and used + each.num_bytes > most:
            shards.append({})
            used = 0
        shards[-1][name] = each
        used += each.num_bytes
    return shards


def _write_pickled(source: CheckpointSource, path: Path) -> None:
    """By way of a file mapped into memory: ``torch.save`` wants all tensors at once."""
    values = path.with_name(f"{path.name}.values")
    try:
        _write_file(source, values, _stored(source))
        weights = _mapped(values)
        weights |= {alias: weights[kept] for alias, kept in source.manifest.tied.items()}
        torch.save({**weights, **source.manifest.module_state}, path)
        sync(path)
    finally:
        values.unlink(missing_ok=True)


def _mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file that nobody else knows, not copied into memory."""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors: dict[str, Tensor] = {}
    for name, span in read_header(path).items():
        facts = span.facts
        if facts.num_bytes == 0:
            tensors[name] = torch.empty(facts.shape, dtype=facts.torch_dtype)
            continue
        # each gets a storage of its own bytes alone, which is what is saved
        part = torch.frombuffer(memory, dtype=torch.uint8, count=facts.num_bytes, offset=span.begin)
        tensors[name] = part.view(facts.torch_dtype).view(facts.shape)
    return tensors


Read = Callable[[str, slice | None], Tensor]


def _compare(source: CheckpointSource, written: Path, target: Path) -> None:
    """Read back what was written.

    Raises:
        CheckpointError: it is not what is in the checkpoint, such as on failing storage.
    """
    try:
        if written.suffix in _PICKLED_ENDINGS:
            expected = set(source.names)
            found, read = _open_pickled(written, source.manifest.module_state)
        else:
            expected = set(_stored(source))
            copy = open_source(written)
            found, read = {name: copy.facts(name) for name in copy.names}, copy.read
    except OSError:
        raise
    except Exception as error:  # torch raises many kinds for a file that is not whole
        raise CheckpointError(target, f"it does not read back: {error}; try again") from error
    wrong = sorted(expected ^ found.keys())
    wrong += [name for name in found if not wrong and not _is_same(name, source, found, read)]
    if wrong:
        raise CheckpointError(
            target, f"{wrong[0]!r:.100} reads back otherwise than it was written; try again"
        )


def _is_same(
    name: str, source: CheckpointSource, found: Mapping[str, TensorFacts], read: Read
) -> bool:
    facts = source.facts(name)
    return found[name] == facts and all(
        _same_bits(source.read(name, rows), read(name, rows))
        for rows in row_chunks(facts, _COMPARED_BYTES)
    )


def _open_pickled(path: Path, plain: Mapping[str, Any]) -> tuple[dict[str, TensorFacts], Read]:
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    tensors = {name: value for name, value in content.items() if name not in plain}
    if encode({name: content[name] for name in plain}) != encode(dict(plain)):
        raise ValueError("the plain state of modules has changed")

    def read(name: str, rows: slice | None) -> Tensor:
        return tensors[name] if rows is None else tensors[name][rows]

    return {name: facts_of(tensor) for name, tensor in tensors.items()}, read


def row_chunks(facts: TensorFacts, most_bytes: int) -> Sequence[slice | None]:
    """Rows of a tensor that are at most ``most_bytes`` together, where a row is not more."""
    if facts.num_bytes <= most_bytes:
        return (None,)
    num_rows = facts.shape[0]
    step = max(1, most_bytes * num_rows // facts.num_bytes)
    return [slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
