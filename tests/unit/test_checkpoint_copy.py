"""Checkpoints copied between file systems: all of it or none, and nothing that was not written."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from dmuon_platform.checkpoint_copy import MANIFEST_FILE, Place, copy_checkpoint
from dmuon_platform.errors import CopyError, DamagedSourceError
from first_release import recipe
from pyarrow.fs import FileSelector, LocalFileSystem, SubTreeFileSystem, _MockFileSystem
from saved import cut, flip

import dmuon

NAMES = sorted(path.name for path in recipe.CHECKPOINT.iterdir())
WEIGHTS = "model-00002-of-00004.safetensors"
SOURCE = Place.of(str(recipe.CHECKPOINT))


def sub_tree(folder: Path) -> Place:
    folder.mkdir(exist_ok=True)
    return Place("subtree", SubTreeFileSystem(str(folder), LocalFileSystem()), "a/b")


KINDS: dict[str, Callable[[Path], Place]] = {
    "path": lambda folder: Place.of(str(folder / "new")),
    "file URL": lambda folder: Place.of((folder / "new").as_uri()),
    "URL of fsspec": lambda folder: Place.of(f"fsspec+memory://{folder}/new"),
    "sub-tree": lambda folder: sub_tree(folder / "tree"),
    "in memory": lambda folder: Place("mock", _MockFileSystem(), "bucket/new"),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names(place: Place) -> list[str]:
    found = place.files.get_file_info(FileSelector(place.path, allow_not_found=True))
    return sorted(each.base_name for each in found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_comes_back_byte_for_byte(kind: str, tmp_path: Path) -> None:
    remote = KINDS[kind](tmp_path)
    done = copy_checkpoint(SOURCE, remote)
    assert (done.step, sorted(done.files), done.kept) == (recipe.NUM_STEPS, NAMES, ())
    assert names(remote) == NAMES
    copy_checkpoint(remote, Place.of(str(tmp_path / "back")))
    assert contents(tmp_path / "back") == contents(recipe.CHECKPOINT)
    assert dmuon.verify_checkpoint(tmp_path / "back").step == recipe.NUM_STEPS
    with pytest.raises(CopyError, match="a checkpoint is there already"):
        copy_checkpoint(SOURCE, remote)


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink], ids=["changed", "cut", "missing"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_is_not_copied_and_the_copy_goes_on_once_it_is_repaired(
    kind: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    broken, remote = tmp_path / "broken", KINDS[kind](tmp_path)
    shutil.copytree(recipe.CHECKPOINT, broken)
    damage(broken / WEIGHTS)
    with pytest.raises((DamagedSourceError, FileNotFoundError), match=WEIGHTS):
        copy_checkpoint(Place.of(str(broken)), remote)
    brought = names(remote)
    assert brought
    assert not {MANIFEST_FILE, WEIGHTS} & set(brought)
    shutil.copyfile(recipe.CHECKPOINT / WEIGHTS, broken / WEIGHTS)
    done = copy_checkpoint(Place.of(str(broken)), remote)
    assert list(done.kept) == brought
    copy_checkpoint(remote, Place.of(str(tmp_path / "back")))
    assert contents(tmp_path / "back") == contents(recipe.CHECKPOINT)


def foreign(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")


def half(folder: Path) -> None:
    shutil.copyfile(recipe.CHECKPOINT / WEIGHTS, folder / WEIGHTS)
    cut(folder / WEIGHTS)


def other(folder: Path) -> None:
    shutil.copyfile(recipe.CHECKPOINT / WEIGHTS, folder / WEIGHTS)
    flip(folder / WEIGHTS)


@pytest.mark.parametrize(
    ("fill", "reason"),
    [
        (foreign, r"notes\.txt in it is not one of the files"),
        (half, f"{WEIGHTS} in it is not one of the files"),
        (other, f"{WEIGHTS} is there already and differs"),
        (lambda folder: (folder / WEIGHTS).mkdir(), f"{WEIGHTS} in it is not one of the files"),
    ],
    ids=["foreign", "half", "other", "folder"],
)
def test_nothing_is_overwritten(fill: Callable[[Path], None], reason: str, tmp_path: Path) -> None:
    target = tmp_path / "new"
    target.mkdir()
    fill(target)
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    with pytest.raises(CopyError, match=reason):
        copy_checkpoint(SOURCE, Place.of(str(target)))
    after = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    assert after.items() >= before.items()
    assert MANIFEST_FILE not in after


def test_what_is_no_checkpoint_or_nowhere_is_refused(tmp_path: Path) -> None:
    target = Place.of(str(tmp_path / "new"))
    with pytest.raises(CopyError, match=r"it has no manifest\.json, so it is no checkpoint"):
        copy_checkpoint(Place.of(str(tmp_path)), target)
    (tmp_path / MANIFEST_FILE).write_text("{}")
    with pytest.raises(DamagedSourceError, match="its manifest cannot be read"):
        copy_checkpoint(Place.of(str(tmp_path)), target)
    for url in ("nowhere://bucket/x", "fsspec+nowhere://bucket/x"):
        with pytest.raises(CopyError, match=f"{url.replace('+', '.')}: cannot be reached"):
            Place.of(url)
    assert not (tmp_path / "new").exists()


class StopHereError(Exception):
    pass


def test_the_manifest_is_the_last_that_is_written(tmp_path: Path) -> None:
    """At each file that is opened at the target, whatever is there before is no checkpoint."""
    order: list[str] = []

    class Watched(SubTreeFileSystem):
        def open_output_stream(self, path: str, *args: object, **options: object) -> object:
            order.append(Path(path).name)
            if len(order) == len(NAMES):
                raise StopHereError
            return super().open_output_stream(path, *args, **options)

    remote = Place("watched", Watched(str(tmp_path), LocalFileSystem()), "new")
    with pytest.raises(StopHereError):
        copy_checkpoint(SOURCE, remote)
    assert order[-1] == MANIFEST_FILE
    assert sorted(order) == NAMES
    assert names(remote) == [name for name in NAMES if name != MANIFEST_FILE]
