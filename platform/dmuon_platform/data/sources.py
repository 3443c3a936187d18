"""Which files a job's text comes from, in an order and with a digest that are always the same."""

import glob
import hashlib
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dmuon_platform.data.shards import digest_file
from dmuon_platform.errors import SpecError
from dmuon_platform.spec.user_path import user_path

PYTHON_STDLIB = "python-stdlib"
"""The source that is always there: this interpreter's own library, as text. About 11 MB."""

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".zip"}


def find_files(source: str | Sequence[str]) -> list[Path]:
    """Return the files of ``source``, sorted, each once; absolute, so that any process finds them.

    Raises:
        SpecError: A glob matches no file, or files are compressed.
    """
    if source == PYTHON_STDLIB:
        return _stdlib_files()
    patterns = [source] if isinstance(source, str) else list(source)
    if not patterns:
        raise SpecError(f"data.source is empty; name files, or {PYTHON_STDLIB!r}.")
    found: set[Path] = set()
    for pattern in patterns:
        matches = {Path(match).resolve() for match in _expand(pattern)}
        files = {match for match in matches if match.is_file()}
        if not files:
            raise SpecError(_no_match(pattern, bool(matches)))
        found |= files
    for file in sorted(found):
        if file.suffix.lower() in _COMPRESSED:
            raise SpecError(f"data.source: {file} is compressed; decompress it first.")
    return sorted(found)


def digest_files(files: Sequence[Path]) -> str:
    """Return a SHA-256 of the files' contents and formats in order; where they lie is no part."""
    whole = hashlib.sha256()
    with ThreadPoolExecutor(4) as pool:  # hashing and reading both release the interpreter lock
        for file, digest in zip(files, pool.map(_digest_file, files), strict=True):
            whole.update(f"{file.suffix.lower()} {digest}\n".encode())
    return whole.hexdigest()


def _digest_file(file: Path) -> str:
    try:
        return digest_file(file)
    except OSError as error:
        raise SpecError(f"data.source: {file} cannot be read: {error.strerror}.") from error


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in root.rglob("*.py")
        if not _NOT_LIBRARY.intersection(file.relative_to(root).parts)
    ]
    if not files:
        raise SpecError(
            f"data.source is {PYTHON_STDLIB!r}, but {root} holds no .py files: this Python ships "
            "its library in another form. Set data.source to text files of your own."
        )
    return sorted(files)


def _expand(pattern: str) -> list[str]:
    expanded = str(user_path(pattern))
    # A file whose name happens to hold [ or * is meant literally.
    return [expanded] if Path(expanded).exists() else glob.glob(expanded, recursive=True)


def _no_match(pattern: str, has_folders: bool) -> str:
    if has_folders:
        return (
            f"data.source: {pattern!r} matches only folders; name the files in them, for example "
            f"{str(Path(pattern) / '*.txt')!r}."
        )
    return (
        f"data.source: no file matches {pattern!r}, looked up from {Path.cwd()}. Name existing "
        f"text, JSONL or Parquet files, or use {PYTHON_STDLIB!r}."
    )
