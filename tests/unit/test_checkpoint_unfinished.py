"""The folder of a save: taken when it is empty or what a kill left, and never anybody else's."""

import os
from pathlib import Path

import pytest

from dmuon import CheckpointError, list_checkpoints
from dmuon.checkpoint.unfinished import MARK_FILE, begin

LEFT = [
    MARK_FILE,
    ".model-00002-of-00004.safetensors.4711.tmp",
    ".manifest.json.4711.tmp",
    "config.json",
    "model-00001-of-00004.safetensors",
    "model.safetensors.index.json",
    "optim-00001-of-00004.safetensors",
]


def holding(folder: Path, names: list[str]) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text(f"of {name}")
    return folder


def held(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_kill_left_is_moved_aside_whole_and_never_over_something(tmp_path: Path) -> None:
    folder = holding(tmp_path / "new", LEFT)
    holding(tmp_path / "new.unfinished-1", ["mine"])
    with pytest.warns(UserWarning, match=r"new held a save .* moved to .*new\.unfinished-2"):
        begun = begin(folder, ["config.json"])
    assert held(folder) == [MARK_FILE]
    assert held(tmp_path / "new.unfinished-2") == sorted(LEFT)
    assert held(tmp_path / "new.unfinished-1") == ["mine"]
    begun.undo()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (LEFT[1:], "not empty; nothing is overwritten"),  # as a Hugging Face folder has them
        ([*LEFT, "manifest.json"], "not empty; nothing is overwritten"),
        ([*LEFT, "notes.txt"], r"'notes\.txt' is none of its files"),
        ([*LEFT, ".notes.txt.1.tmp"], r"'\.notes\.txt\.1\.tmp' is none of its files"),
        ([*LEFT, "model-1.safetensors"], r"'model-1\.safetensors' is none of its files"),
    ],
)
def test_anything_else_is_refused_and_left_alone(
    names: list[str], reason: str, tmp_path: Path
) -> None:
    folder = holding(tmp_path / "new", names)
    with pytest.raises(ValueError, match=reason):
        begin(folder, ["config.json"])
    assert held(folder) == sorted(names)
    assert held(tmp_path) == ["new"]


@pytest.mark.parametrize("names", [[], [MARK_FILE]], ids=["empty", "marked"])
def test_an_empty_folder_stays_where_it_is_also_after_a_failure(
    names: list[str], tmp_path: Path
) -> None:
    folder = holding(tmp_path / "new", names)
    place = folder.stat().st_ino
    begin(folder, []).undo()
    assert (held(folder), folder.stat().st_ino) == ([], place)


def test_a_link_to_the_folder_stays_a_link(tmp_path: Path) -> None:
    holding(tmp_path / "disk" / "new", LEFT)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk" / "new")
    with pytest.warns(UserWarning, match="never finished"):
        begin(link, ["config.json"])
    assert link.is_symlink()
    assert held(tmp_path / "disk") == ["new", "new.unfinished-1"]
    assert held(link) == [MARK_FILE]


def test_a_save_whose_folder_was_taken_by_another_commits_and_removes_nothing(
    tmp_path: Path,
) -> None:
    first = begin(tmp_path / "new", [])
    first.release()  # as on storage without locks
    (tmp_path / "new" / "optim-00001-of-00001.safetensors").touch()
    with pytest.warns(UserWarning, match="never finished"):
        second = begin(tmp_path / "new", [])
    with pytest.raises(CheckpointError, match="moved or removed while it was written"):
        first.check()
    first.undo()
    second.check()
    assert held(tmp_path / "new") == [MARK_FILE]


@pytest.mark.parametrize("written", [[], ["model.safetensors"]], ids=["only marked", "written"])
def test_a_folder_in_which_a_save_goes_on_is_refused_until_that_is_over(
    written: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "new"
    first = begin(folder, [])
    for name in written:
        (folder / name).touch()
    with pytest.raises(ValueError, match="another save is going on in it"):
        begin(folder, [])
    first.check()
    assert held(folder) == [MARK_FILE, *written]
    child = os.dup(first.mark.fileno())  # as a process has it that is forked meanwhile
    try:
        first.release()
        for name in written:
            (folder / name).unlink()
        begin(folder, []).check()
    finally:
        os.close(child)


def test_a_save_that_fails_removes_what_is_its_own_alone(tmp_path: Path) -> None:
    begun = begin(tmp_path / "new", ["config.json"])
    for name in [*LEFT, "notes.txt"]:
        (tmp_path / "new" / name).touch()
    begun.undo()
    assert held(tmp_path / "new") == ["notes.txt"]


def test_a_folder_in_which_a_save_has_begun_is_listed_as_unfinished(tmp_path: Path) -> None:
    begun = begin(tmp_path / "new", [])
    (passed_over,) = list_checkpoints(tmp_path).passed_over
    assert (passed_over.path, passed_over.is_damaged) == (tmp_path / "new", False)
    assert "writing it was never finished" in passed_over.reason
    begun.finish()
    assert held(tmp_path / "new") == []
