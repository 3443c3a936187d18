"""A run of many checkpoints: as few manifests are read as in a run of a few, whatever is kept."""

import json
from pathlib import Path

import pytest
from dmuon_platform.spec.checkpoint import CheckpointSpec
from dmuon_platform.store import CheckpointStore
from unit.stored import MODEL_FILE, save, save_many

import dmuon

RULE = CheckpointSpec(every=1, keep_last=3, keep_every=1, keep_best=2)
CATALOGUE = "checkpoints.jsonl"


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """The folders whose manifests were read."""
    names: list[str] = []
    read_manifest = dmuon.read_manifest

    def counted(folder: Path) -> dmuon.Manifest:
        names.append(folder.name)
        return read_manifest(folder)

    monkeypatch.setattr(dmuon, "read_manifest", counted)
    return names


def losses_to(number: int) -> dict[int, float]:
    """The later half is worse, so that the best and the newest are others."""
    return {step: 1 + abs(step - number // 2) / number for step in range(1, number + 1)}


@pytest.mark.parametrize("number", [20, 300])
def test_resuming_saving_and_pruning_read_as_many_manifests_however_many_there_are(
    tmp_path, read, number
):
    save_many(CheckpointStore(tmp_path), losses_to(number))
    CheckpointStore(tmp_path).prune(RULE)  # the catalogue is made
    read.clear()
    store = CheckpointStore(tmp_path)
    assert store.newest_verified() is not None
    assert read == [f"step-{number:08d}"]
    read.clear()
    save(store, number + 1, loss=3.0)
    assert read == [f"step-{number + 1:08d}.writing-a0"]
    read.clear()
    store.prune(RULE)
    newest = {number + 1, number, number - 1}
    best = {number // 2, number // 2 + 1}
    assert sorted(read) == [f"step-{step:08d}" for step in sorted(newest | best)]
    read.clear()
    store.prune(RULE.model_copy(update={"keep_every": 2}))
    odd = {step for step in range(1, number + 2) if step % 2}
    assert sorted(read) == [f"step-{step:08d}" for step in sorted(newest | best | odd)]


CATALOGUES = {
    "lost": lambda path: path.unlink(),
    "of half": lambda path: path.write_text("".join(path.open().readlines()[::2])),
    "torn": lambda path: path.write_text(path.read_text()[:-30]),
    "wrong": lambda path: path.write_text(
        "".join(
            json.dumps(json.loads(line) | {"evaluation_loss": float(index % 3)}) + "\n"
            for index, line in enumerate(path.open())
        )
    ),
    "of another version": lambda path: path.write_text('{"name": "step-00000001"}\n'),
}


@pytest.mark.parametrize("change", CATALOGUES)
@pytest.mark.filterwarnings("ignore:.*is damaged and skipped")
def test_whatever_the_catalogue_says_the_manifests_decide(tmp_path, change):
    losses = {1: 5.0, 2: 1.0, 3: None, 4: 4.0, 5: 0.5, 6: 6.0, 7: float("nan"), 8: 7.0}
    save_many(CheckpointStore(tmp_path), losses)
    CheckpointStore(tmp_path).prune(RULE)
    CATALOGUES[change](tmp_path / CATALOGUE)
    store = CheckpointStore(tmp_path)
    store.prune(CheckpointSpec(every=1, keep_last=1, keep_best=2))
    assert [each.step for each in store.list()] == [2, 5, 8]


def test_a_damaged_checkpoint_is_not_among_the_best_and_stays(tmp_path):
    store = CheckpointStore(tmp_path)
    for step, loss in enumerate([1.0, 2.0, 3.0, 4.0], start=1):
        save(store, step, loss=loss)
    (store.folder / "step-00000001" / MODEL_FILE).unlink()
    with pytest.warns(UserWarning, match="step-00000001"):
        store.prune(CheckpointSpec(every=1, keep_last=1, keep_best=1))
    assert [each.step for each in store.list()] == [2, 4]
    assert (store.folder / "step-00000001").is_dir()


def test_steps_of_more_digits_are_newer(tmp_path):
    store = CheckpointStore(tmp_path)
    save_many(store, {99_999_999: None, 100_000_000: None})
    assert [each.step for each in store.list()] == [99_999_999, 100_000_000]


def test_a_checkpoint_that_cannot_be_recorded_yet_is_not_pruned(tmp_path):
    store = CheckpointStore(tmp_path)
    (tmp_path / "manifests").touch()  # in the way, as a full disk would be
    for step in (1, 2):
        with pytest.warns(UserWarning, match="trackers are told"):
            save(store, step)
    with pytest.warns(UserWarning, match="trackers are told"):
        store.prune(CheckpointSpec(keep_last=1))
    assert [each.step for each in store.list()] == [1, 2]
    (tmp_path / "manifests").unlink()
    store.prune(CheckpointSpec(keep_last=1))
    assert [each.step for each in store.list()] == [2]
    assert len(list((tmp_path / "manifests").iterdir())) == 2
    lines = (tmp_path / CATALOGUE).read_text().splitlines()
    assert {json.loads(line)["step"] for line in lines} == {1, 2}
