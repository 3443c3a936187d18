"""Tools over folders of checkpoints: what they list, describe and verify."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from saved import cut, flip, hand_made, tied, write_checkpoints

import dmuon
from dmuon.checkpoint import listing
from dmuon.checkpoint import manifest as manifests


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_checkpoints(folder)
    return folder


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(written, tmp_path / "run"))


def optim_file(checkpoint: Path) -> Path:
    return checkpoint / "optim-00001-of-00002.safetensors"


def test_checkpoints_are_listed_by_step_whatever_they_are_called(tmp_path: Path) -> None:
    for name, step in (("b", 9), ("c", 10), ("a", 100)):
        hand_made(tmp_path / name, step, {"w": torch.zeros(2, 3)})
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "out.txt").write_text("no checkpoint")
    (tmp_path / "notes.txt").write_text("nor this")
    found = dmuon.list_checkpoints(tmp_path)
    assert [(each.path.name, each.step) for each in found.whole] == [
        ("b", 9),
        ("c", 10),
        ("a", 100),
    ]
    assert {(each.num_weights, each.has_optimizer) for each in found.whole} == {(1, False)}
    assert found.passed_over == ()


def test_what_is_not_whole_is_listed_apart_by_name_and_with_the_reason(run: Path) -> None:
    for name in ("cut", "gone", "header", "unfinished"):
        shutil.copytree(run / "step-1", run / name)
    cut(optim_file(run / "cut"))
    optim_file(run / "gone").unlink()
    flip(run / "header" / "manifest.json", at=500)
    (run / "unfinished" / "manifest.json").unlink()
    (run / "begun").mkdir()
    found = dmuon.list_checkpoints(run)
    num_weights = len(list(tied().parameters()))
    assert [each.path.name for each in found.whole] == ["step-1", "step-2"]
    assert all(each.has_optimizer and each.num_weights == num_weights for each in found.whole)
    reasons = {each.path.name: (each.is_damaged, each.reason) for each in found.passed_over}
    assert list(reasons) == ["begun", "cut", "gone", "header", "unfinished"]
    for name, damaged, words in (
        ("begun", False, "never finished"),
        ("cut", True, "optim-00001-of-00002.safetensors was cut"),
        ("gone", True, "optim-00001-of-00002.safetensors is missing"),
        ("header", True, "changed since it was written"),
        ("unfinished", False, "never finished"),
    ):
        assert reasons[name][0] is damaged, name
        assert words in reasons[name][1]


def test_listing_thousands_reads_each_manifest_once_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hand_made(tmp_path / "run" / "0", 0, {"w": torch.zeros(3)})
    for number in range(1, 2000):
        folder = tmp_path / "run" / str(number)
        folder.mkdir()
        for name in ("model.safetensors", "manifest.json"):
            os.link(first / name, folder / name)
    opened: list[Path] = []
    real = Path.open

    def counting(path: Path, *args: object, **options: object) -> object:
        opened.append(path)
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "open", counting)
    assert len(dmuon.list_checkpoints(tmp_path / "run").whole) == 2000
    assert {path.name for path in opened} == {"manifest.json"}
    assert len(opened) == len(set(opened)) == 2000


def test_the_newest_alone_are_read_whatever_they_are_called_and_however_many_are_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, step in (("b", 9), ("z", 1000), ("c", 10), ("a", 100), ("e", 8), ("d", 7)):
        hand_made(tmp_path / name, step, {"w": torch.zeros(2, 3)})
    (tmp_path / "z" / "model.safetensors").unlink()
    (tmp_path / "d" / "manifest.json").unlink()
    os.mkfifo(tmp_path / "d" / "manifest.json")  # to open it would be to wait for ever
    read: list[str] = []
    real = listing.read_manifest

    def counting(path: Path) -> manifests.Manifest:
        read.append(path.name)
        return real(path)

    monkeypatch.setattr(listing, "read_manifest", counting)
    found = dmuon.list_checkpoints(tmp_path, newest=2)
    assert [each.path.name for each in found.whole] == ["c", "a"]
    assert [each.path.name for each in found.passed_over] == ["d", "z"]
    assert sorted(read) == ["a", "c", "d", "z"]
    assert len(dmuon.list_checkpoints(tmp_path, newest=99).whole) == 4
    with pytest.raises(ValueError, match="at least 1, got 0"):
        dmuon.list_checkpoints(tmp_path, newest=0)


def test_a_description_says_what_was_saved(written: Path) -> None:
    about = dmuon.describe_checkpoint(written / "step-2")
    assert (about.step, about.mesh) == (2, {"replicate": 1, "shard": 2})
    assert about.extra == {"tokens": 192, "betas": (0.9, 0.95)}
    assert about.tied == {"head.weight": "embed.weight"}
    assert about.optimizer is not None
    assert about.optimizer.num_steps == 2
    assert {"torch", "dmuon"} <= about.versions.keys()
    on_disk = {each.name: each.stat().st_size for each in (written / "step-2").iterdir()}
    assert about.files == on_disk
    assert about.num_bytes == sum(on_disk.values())
    model = tied()
    weights = about.sections["model"]
    num_values = sum(param.numel() for param in model.parameters())
    assert weights.num_tensors == len(list(model.parameters()))
    assert (weights.num_bytes, weights.dtypes) == (4 * num_values, {"F32": 4 * num_values})
    hidden = sum("proj.weight" in name for name, _ in model.named_parameters())
    assert about.sections["optim"].num_tensors == hidden + 2 * (weights.num_tensors - hidden)
    assert (about.problem, about.unlisted) == (None, ())


def test_a_description_names_strange_files_and_what_sizes_show(run: Path) -> None:
    (run / "step-1" / "pytorch_model.bin").write_bytes(b"strange")
    cut(optim_file(run / "step-1"))
    about = dmuon.describe_checkpoint(run / "step-1")
    assert about.unlisted == ("pytorch_model.bin",)
    assert "optim-00001-of-00002.safetensors was cut" in (about.problem or "")


def test_verifying_names_every_file_that_is_not_what_was_written(run: Path) -> None:
    assert dmuon.verify_checkpoint(run / "step-1").step == 1
    flip(optim_file(run / "step-1"))
    (run / "step-1" / "config.json").unlink()
    with pytest.raises(dmuon.DamagedCheckpointError) as caught:
        dmuon.verify_checkpoint(run / "step-1")
    assert "optim-00001-of-00002.safetensors has changed" in caught.value.reason
    assert "config.json is missing" in caught.value.reason
    assert "model-" not in caught.value.reason


TOOLS = [
    dmuon.describe_checkpoint,
    dmuon.verify_checkpoint,
    dmuon.read_optimizer_state,
    lambda path: dmuon.export_weights(path, path.parent / "out"),
]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_folder_of_the_unreleased_format_is_named_as_such(
    tool: Callable[[Path], object], tmp_path: Path
) -> None:
    old = tmp_path / "checkpoints" / "step-00000003"
    old.mkdir(parents=True)
    facts = {"step": 3, "attempt": 0, "files": {}, "tensors": {}, "format_version": 1}
    (old / manifests.MANIFEST_FILE).write_text(json.dumps(facts, indent=1))
    with pytest.raises(dmuon.CheckpointError, match="a format that was never released") as caught:
        tool(old)
    assert not isinstance(caught.value, dmuon.DamagedCheckpointError)
    (passed_over,) = dmuon.list_checkpoints(old.parent).passed_over
    assert "never released" in passed_over.reason
    assert not passed_over.is_damaged
    assert not (old.parent / "out").exists()


@pytest.mark.parametrize("tool", [*TOOLS, dmuon.list_checkpoints])
def test_a_path_where_nothing_is_is_bad_use_rather_than_damage(
    tool: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(dmuon.CheckpointError, match="there is no such folder") as caught:
        tool(tmp_path / "nowhere")
    assert not isinstance(caught.value, dmuon.DamagedCheckpointError)


def test_listing_a_checkpoint_points_to_the_folder_around_it(written: Path) -> None:
    with pytest.raises(dmuon.CheckpointError, match=f"give the folder around it: {written}"):
        dmuon.list_checkpoints(written / "step-1")


def test_the_format_of_the_manifest_is_not_loosened_by_the_older_one(run: Path) -> None:
    """A manifest of ours whose ``format`` is gone is damaged, not of the platform."""
    path = run / "step-1" / manifests.MANIFEST_FILE
    path.write_text(path.read_text().replace('"format": "dmuon-checkpoint",', ""))
    with pytest.raises(dmuon.DamagedCheckpointError, match="changed since it was written"):
        dmuon.describe_checkpoint(run / "step-1")
