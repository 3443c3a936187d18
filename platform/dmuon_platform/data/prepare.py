"""A job's text to a dataset on disk, made once; and what is checked before any of it."""

import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dmuon_platform.data.documents import read_documents
from dmuon_platform.data.info import (
    BIGRAM_FILE,
    FORMAT,
    INDEX,
    DatasetInfo,
    read_index,
)
from dmuon_platform.data.settings import DataSettings
from dmuon_platform.data.shards import digest_file
from dmuon_platform.data.sources import digest_files, find_files
from dmuon_platform.data.split import passage_bytes
from dmuon_platform.data.tokenise import TokeniseTask, tokenise_files
from dmuon_platform.data.tokenizer import TextTokenizer, check_vocabulary, load_tokenizer
from dmuon_platform.data.writer import write_dataset
from dmuon_platform.durable_file import sync
from dmuon_platform.errors import PlatformError, SpecError

_MOST_COUNTED = 4 << 20  # bytes of text, which even a vocabulary reads in seconds
_DIGITS = 16  # of the digest, in the folder's name
_LEFT_S = 24 * 60 * 60.0  # without a write, and nobody builds there any more


def check_data(settings: DataSettings, vocab_size: int, model_path: str | None = None) -> None:
    """Refuse a ``data`` section that cannot work, in a moment and without Ray.

    Files are found, and each one is opened and its first document read.

    Raises:
        SpecError: What is wrong with source, tokenizer or vocabulary.
    """
    tokenizer = load_tokenizer(settings.tokenizer)
    check_vocabulary(settings.tokenizer, tokenizer, vocab_size, model_path)
    has_text = False
    for file in find_files(settings.source):
        has_text |= next(read_documents(file, settings.text_field), None) is not None
    if not has_text:
        raise SpecError(f"data.source = {settings.source!r} holds no text: all files are empty.")


def check_size(info: DatasetInfo, global_batch_size: int) -> None:
    """Refuse a dataset that does not fill one batch.

    Raises:
        SpecError: An epoch has fewer samples than a global batch.
    """
    available = info.num_train_sequences
    if available < global_batch_size:
        raise SpecError(
            f"The training text has {available} samples of {info.sequence_length} tokens, fewer "
            f"than one batch of train.global_batch_size = {global_batch_size}. Give more text, or "
            f"set train.global_batch_size to at most {available} or data.sequence_length lower."
        )


def find_dataset(settings: DataSettings, cache_dir: Path | str) -> DatasetInfo | None:
    """Return the dataset of a job if it is prepared already and intact; starts nothing.

    Raises:
        SpecError: What is wrong with the source.
    """
    return dataset_of(_Wanted.by(settings).digest, cache_dir)


def dataset_of(digest: str, cache_dir: Path | str) -> DatasetInfo | None:
    """Return the prepared dataset with a digest, if it is there and intact."""
    return _find_intact(_folder_of(digest, cache_dir), digest)


def measure_data(settings: DataSettings) -> DatasetInfo | None:
    """Return what a job's dataset would be, and leave none; None for more text than a few MiB.

    Raises:
        SpecError: What is wrong with the source, or that it is too short.
    """
    if sum(file.stat().st_size for file in find_files(settings.source)) > _MOST_COUNTED:
        return None
    with tempfile.TemporaryDirectory() as folder:
        return prepare_dataset(settings, folder)


def prepare_dataset(settings: DataSettings, cache_dir: Path | str) -> DatasetInfo:
    """Return the dataset of a job, tokenising it if it is not there yet, with Ray Data if large.

    The folder ``cache_dir/<digest>`` is named for everything that goes into it. One that is there
    is verified, and made anew when damaged. Ray must be initialised only when it has to be made.

    Raises:
        SpecError: What is wrong with the source, or that it is too short.
        PlatformError: The cache folder cannot be written.
    """
    wanted = _Wanted.by(settings)
    tokenizer, digest = wanted.tokenizer, wanted.digest
    folder = _folder_of(digest, cache_dir)
    found = _find_intact(folder, digest)
    if found is not None:
        return found
    building = folder.with_name(f".{folder.name}.{socket.gethostname()}-{os.getpid()}")
    try:
        _remove_leftovers(folder)
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        task = TokeniseTask(tokenizer, settings.text_field, wanted.limit)
        passages = tokenise_files(wanted.files, task)
        identity = (digest, settings.sequence_length, settings.validation_fraction)
        write_dataset(building, passages, tokenizer, identity)
        return _publish(building, folder, digest)
    except OSError as error:
        raise PlatformError(
            f"The prepared dataset cannot be written to {folder} ({error}). It lies beside the "
            "runs; set `storage` to a folder with room that can be written."
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove what was not built to its end, on any machine, by processes that were killed."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        with suppress(OSError):  # another driver may be at it, or it is none of ours
            written = max(each.stat().st_mtime for each in (left, *left.iterdir()))
            if time.time() - written > _LEFT_S:
                shutil.rmtree(left, ignore_errors=True)


@dataclass(frozen=True)
class _Wanted:
    """What goes into a dataset, and the digest of all that."""

    tokenizer: TextTokenizer
    files: list[Path]
    limit: int
    digest: str

    @classmethod
    def by(cls, settings: DataSettings) -> "_Wanted":
        tokenizer = load_tokenizer(settings.tokenizer)
        files = find_files(settings.source)
        limit = passage_bytes(files, settings.validation_fraction)
        return cls(tokenizer, files, limit, _digest(settings, tokenizer, files, limit))


def _folder_of(digest: str, cache_dir: Path | str) -> Path:
    return Path(cache_dir).absolute() / digest[:_DIGITS]


def _digest(settings: DataSettings, tokenizer: TextTokenizer, files: list[Path], limit: int) -> str:
    identity = {
        "format": FORMAT,
        "source": digest_files(files),
        "text_field": settings.text_field,
        "tokenizer": hashlib.sha256(tokenizer.to_json().encode()).hexdigest(),
        "sequence_length": settings.sequence_length,
        "validation_fraction": settings.validation_fraction,
        "passage_bytes": limit,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _find_intact(folder: Path, digest: str) -> DatasetInfo | None:
    """Return the dataset in ``folder`` if it is the one meant, down to the last bit."""
    if not (folder / INDEX).exists():
        return None
    try:
        info = read_index(folder)
    except PlatformError:
        return None
    files = {shard.file: shard.sha256 for shard in (*info.train_shards, *info.validation_shards)}
    files |= {BIGRAM_FILE: info.bigram_sha256}
    is_intact = all(digest_file(folder / name) == sha256 for name, sha256 in files.items())
    return info if info.digest == digest and is_intact else None


def _publish(building: Path, folder: Path, digest: str) -> DatasetInfo:
    # Another driver may have published the same dataset meanwhile; then its is as good as ours.
    if _find_intact(folder, digest) is None:
        if folder.exists():
            aside = building.with_name(f"{building.name}.damaged")
            folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
        building.rename(folder)
        sync(folder.parent)
    return read_index(folder)
