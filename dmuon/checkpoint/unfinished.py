"""The folder of a save until its manifest is there, and what a save leaves that is killed. Local.

A save marks its folder before it writes anything else. So what a killed one leaves is told from
all that is not ours, such as a Hugging Face folder, whose files have the same names. It holds a
lock on the mark, which the system takes back when the process dies.
"""

import fcntl
import os
import re
import warnings
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dmuon.checkpoint.assignment import is_tensor_file
from dmuon.checkpoint.index_file import INDEX_FILE
from dmuon.checkpoint.manifest import MANIFEST_FILE
from dmuon.errors import CheckpointError

MARK_FILE = ".saving"
"""It is there until the checkpoint is committed."""
_TEMPORARY = re.compile(r"\.(.+)\.\d+\.tmp")


@dataclass(frozen=True)
class Begun:
    """A folder that a save has begun in.

    Attributes:
        folder: of the checkpoint.
        was_there: it is the caller's own, though it was empty.
        place: of the folder on its file system, whatever its path is.
        mark: open and locked until `release`.
        files: names of the caller's own files in it.
    """

    folder: Path
    was_there: bool
    place: tuple[int, int]
    mark: BinaryIO
    files: Collection[str] = ()

    @property
    def is_there(self) -> bool:
        """Whether the path still leads to the folder."""
        try:
            return _place(self.folder) == self.place
        except OSError:
            return False

    def check(self) -> None:
        """Make sure that what is committed is what was written.

        Raises:
            CheckpointError: the folder is no longer there, or it is another.
        """
        if not self.is_there:
            raise CheckpointError(
                self.folder,
                "its folder was moved or removed while it was written; when two programs save, "
                "give each a path of its own",
            )

    def finish(self) -> None:
        """Take the mark away, once the manifest is there."""
        with suppress(OSError):  # the manifest counts more than the mark
            (self.folder / MARK_FILE).unlink()

    def release(self) -> None:
        """Let another save begin there, also when a child of this process has the mark open."""
        with suppress(OSError):
            fcntl.flock(self.mark, fcntl.LOCK_UN)
        self.mark.close()

    def undo(self) -> None:
        """Leave nothing of what is no checkpoint: the manifest goes first, the mark last.

        What somebody else has put there meanwhile stays.
        """
        if not self.is_there:
            return
        names = [name for name in os.listdir(self.folder) if _is_ours(name, self.files)]
        for name in (MANIFEST_FILE, *names, MARK_FILE):
            with suppress(OSError):
                (self.folder / name).unlink()
        if not self.was_there:
            with suppress(OSError):
                self.folder.rmdir()


def begin(folder: Path, files: Collection[str]) -> Begun:
    """Make the folder of a save, or take an empty one, and mark it.

    What a save left that was killed is moved aside, with a warning that says where to.

    Args:
        folder: of the checkpoint.
        files: names of the caller's own files in it.

    Raises:
        ValueError: it holds anything else, or another save is going on in it.
        OSError: it cannot be made, or moved.
    """
    was_there = folder.is_dir()
    if not was_there and os.path.lexists(folder):
        raise ValueError("there is a file, or a link to nothing; give the path of a new folder")
    held = os.listdir(folder) if was_there else []
    if MARK_FILE in held:
        _lock(folder / MARK_FILE).close()
    if held not in ([], [MARK_FILE]):
        _check_unfinished(held, files)
        folder = folder.resolve()  # a link to it stays one
        aside = _aside(folder)
        folder.rename(aside)
        was_there = False
        warnings.warn(
            f"{folder} held a save that was never finished; it was moved to {aside}, delete it "
            "when nobody needs it",
            stacklevel=2,
        )
    folder.mkdir(parents=True, exist_ok=True)
    try:
        mark = _lock(folder / MARK_FILE)
    except OSError:
        if not was_there:
            folder.rmdir()
        raise
    return Begun(folder, was_there, _place(folder), mark, tuple(files))


def _lock(path: Path) -> BinaryIO:
    """Open the mark of a folder, and lock it where the storage can.

    Raises:
        ValueError: another save has locked it.
    """
    mark = path.open("ab")
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        mark.close()
        raise ValueError(
            "another save is going on in it; give each a path of its own, or wait until it is over"
        ) from None
    except OSError:  # such as a network file system without locks
        pass
    return mark


def _check_unfinished(held: Collection[str], files: Collection[str]) -> None:
    if MARK_FILE not in held or MANIFEST_FILE in held:
        raise ValueError("it is not empty; nothing is overwritten, give another path")
    for name in sorted(held):
        if name != MARK_FILE and not _is_ours(name, files):
            raise ValueError(
                f"a save in it was never finished, but {name!r:.100} is none of its files, so it "
                "is not moved aside; take that out, or give another path"
            )


def _is_ours(name: str, files: Collection[str]) -> bool:
    """Whether a save writes a file of this name, or one before that."""
    temporary = _TEMPORARY.fullmatch(name)
    final = temporary[1] if temporary else name
    return final in {MANIFEST_FILE, INDEX_FILE, *files} or is_tensor_file(final)


def _aside(folder: Path) -> Path:
    number = 1
    while os.path.lexists(aside := folder.with_name(f"{folder.name}.unfinished-{number}")):
        number += 1
    return aside


def _place(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_dev, found.st_ino
