"""Whether the files of a checkpoint are what its manifest says, and who of several ranks looks."""

from collections.abc import Collection, Mapping
from pathlib import Path

from dmuon.checkpoint.durable_file import sha256_of, sums_of
from dmuon.checkpoint.facts import FileFacts
from dmuon.checkpoint.file_names import file_in
from dmuon.checkpoint.manifest import Manifest
from dmuon.errors import CheckpointError, DamagedCheckpointError
from dmuon.flags import check_flags


def verify(
    folder: Path,
    manifest: Manifest,
    *,
    hashes: bool = True,
    fast: bool = False,
    only: Collection[str] | None = None,
) -> None:
    """Compare the files of a checkpoint with its manifest.

    Args:
        folder: the checkpoint.
        manifest: its manifest.
        hashes: read every file and compare its SHA-256 too.
        fast: compare the checksum `WordSums` instead, where the manifest has it.
        only: names of the files to look at; by default all. So ranks can share the work.

    Raises:
        DamagedCheckpointError: with the first file that is missing, cut, grown or changed.
    """
    check_flags(hashes=hashes, fast=fast)
    names = list(manifest.files if only is None else only)
    for name in names:
        if name not in manifest.files:
            raise CheckpointError(folder, f"{name!r:.100} is not one of its files")
    for name in names:
        _check_size(folder, name, manifest.files[name])
    for name in names if hashes else ():
        _check_content(folder, name, manifest.files[name], fast=fast)


def share_out(files: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """Names of the files that each rank looks at, so that all read about as many bytes.

    The largest first, each to the rank that has the fewest so far (Graham 1969).

    Args:
        files: bytes to read of each, by name.
        num_ranks: how many look.
    """
    shares: list[list[str]] = [[] for _ in range(num_ranks)]
    loads = [(0, 0)] * num_ranks  # bytes, files
    for name in sorted(files, key=lambda name: (-files[name], name)):
        rank = min(range(num_ranks), key=loads.__getitem__)
        shares[rank].append(name)
        loads[rank] = (loads[rank][0] + files[name], len(shares[rank]))
    return shares


def _check_size(folder: Path, name: str, facts: FileFacts) -> None:
    size = file_in(folder, name).stat().st_size
    if size != facts.size:
        how = "was cut" if size < facts.size else "has grown"
        raise DamagedCheckpointError(folder, f"{name} {how}: {size} bytes, not {facts.size}")


def _check_content(folder: Path, name: str, facts: FileFacts, *, fast: bool) -> None:
    path = file_in(folder, name)
    try:
        if fast and facts.sums is not None:
            what, is_same = "checksum", sums_of(path) == facts.sums
        else:
            what, is_same = "SHA-256", sha256_of(path) == facts.sha256
    except OSError as error:
        raise DamagedCheckpointError(folder, f"{name} cannot be read: {error}") from error
    if not is_same:
        raise DamagedCheckpointError(folder, f"{name} has changed since it was written ({what})")
