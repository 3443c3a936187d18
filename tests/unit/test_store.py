"""The checkpoints of a run: what is not whole is named and passed over, what counts is kept."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dmuon_platform import store as store_module
from dmuon_platform.errors import SpecError
from dmuon_platform.events import Journal
from dmuon_platform.lease import StaleAttempt
from dmuon_platform.spec.checkpoint import CheckpointSpec
from dmuon_platform.store import Checkpoint, CheckpointStore
from unit import stored
from unit.checkpoint_builders import rewrite_manifest
from unit.stored import MODEL_FILE, OPTIM_FILE, save, write_small

from dmuon import DamagedCheckpointError

LAST = CheckpointSpec(keep_last=1)


class Store(CheckpointStore):
    """A store that remembers what it passed over."""

    def __init__(self, run_dir: Path) -> None:
        self.damages: list[DamagedCheckpointError] = []
        super().__init__(run_dir, self.damages.append)


def newest(run_dir: Path) -> tuple[Checkpoint | None, list[DamagedCheckpointError]]:
    store = Store(run_dir)
    return store.newest_verified(), store.damages


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a flipped byte of the model": lambda path: flip(path / MODEL_FILE),
    "a flipped byte of the optimizer": lambda path: flip(path / OPTIM_FILE),
    "a cut file": lambda path: os.truncate(path / OPTIM_FILE, 100),
    "a missing file": lambda path: (path / MODEL_FILE).unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "an empty manifest": lambda path: (path / "manifest.json").write_text(""),
    "a cut manifest": lambda path: os.truncate(path / "manifest.json", 200),
    "a manifest of something else": lambda path: (path / "manifest.json").write_text("[1]"),
    "a changed manifest": lambda path: (path / "manifest.json").write_text(
        (path / "manifest.json").read_text().replace('"step": 20', '"step": 21')
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path, damage):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    bad = save(store, 20).path
    DAMAGES[damage](bad)
    checkpoint, damages = newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 10
    assert [each.path for each in damages] == [bad]
    assert str(bad) in str(damages[0])
    assert bad.is_dir()


FORMATS = {
    "the platform's of before": lambda path: (path / "manifest.json").write_text(
        '{"step": 20, "attempt": 1, "files": {}, "tensors": {}, "format_version": 1}'
    ),
    "a newer one": lambda path: rewrite_manifest(path, lambda m: m.update(format_version=9)),
}


@pytest.mark.parametrize("change", FORMATS)
def test_a_format_that_is_not_read_stops_the_run_by_name_and_loses_nothing(tmp_path, change):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    other = save(store, 20).path
    FORMATS[change](other)
    with pytest.raises(SpecError, match=str(other)) as caught:
        newest(tmp_path)
    assert "name" in str(caught.value)


def test_the_default_is_to_warn_of_damage(tmp_path):
    bad = save(CheckpointStore(tmp_path), 10).path
    (bad / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="step-00000010"):
        assert CheckpointStore(tmp_path).newest_verified() is None


def test_damaged_checkpoints_survive_pruning_and_saving_the_same_step_again(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    bad = save(store, 20).path
    flip(bad / MODEL_FILE)
    damaged = (bad / MODEL_FILE).read_bytes()
    restarted = Store(tmp_path)
    restarted.newest_verified()
    for step in (15, 20, 30, 40):
        save(restarted, step)
        restarted.prune(LAST)
    assert [each.step for each in restarted.list()] == [40]
    (aside,) = restarted.folder.glob("step-00000020.replaced-*")
    assert (aside / MODEL_FILE).read_bytes() == damaged


def test_contents_once_found_changed_are_never_pruned_by_later_processes(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    bad = save(store, 20).path
    flip(bad / MODEL_FILE)
    newest(tmp_path)
    later = CheckpointStore(tmp_path)
    save(later, 30)
    CheckpointStore(tmp_path).prune(LAST)
    assert bad.is_dir()
    assert not (store.folder / "step-00000010").exists()


def test_pruning_keeps_the_newest_and_their_manifests_stay(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3, 4):
        save(store, step)
    store.prune(CheckpointSpec(keep_last=2))
    assert [each.step for each in store.list()] == [3, 4]
    assert len(list((tmp_path / "manifests").glob("*.json"))) == 4


def test_pruning_never_removes_the_newest_verified(tmp_path):
    store = CheckpointStore(tmp_path)
    good = save(store, 1).path
    for step in (2, 3):
        flip(save(store, step).path / MODEL_FILE)
    fresh = Store(tmp_path)  # a new process, which has verified nothing yet
    fresh.prune(LAST)
    assert good.is_dir()
    assert len(fresh.damages) == 2


def test_pruning_keeps_every_so_many_steps_and_the_best_for_ever(tmp_path):
    store = CheckpointStore(tmp_path)
    rule = CheckpointSpec(every=1, keep_last=1, keep_every=4, keep_best=2)
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 4.0, 5: 2.0, 6: 2.0, 7: None, 8: 5.0, 9: 6.0, 10: 7.0}
    for step, loss in losses.items():
        save(store, step, loss=loss)
        store.prune(rule)
    # 2 and 5 have the lowest losses; 6, as low as 5, is newer
    assert [each.step for each in store.list()] == [2, 4, 6, 8, 10]


MOMENTS = {
    "while the model is written": (stored, "write", 10),
    "before the manifest is written": (stored, "write_manifest", 10),
    "before the rename": (store_module.Path, "rename", 10),
    "after the rename": (store_module, "sync", 20),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_of_a_save_the_older_checkpoint_is_used(tmp_path, moment):
    owner, name, expected = MOMENTS[moment]
    store = CheckpointStore(tmp_path)
    save(store, 10)
    attempt = store.acquire_attempt()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # those of the parent are not here
        setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        save(store, 20, attempt)
        os._exit(1)  # it should have died
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    CheckpointStore(tmp_path).acquire_attempt()
    checkpoint, damages = newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == expected
    unfinished = ["step-00000020.writing-a1"] if expected == 10 else []
    assert [each.path.name for each in damages] == unfinished
    assert all(each.path.is_dir() for each in damages)


def test_what_a_killed_process_left_is_set_aside_and_the_step_is_saved_again(tmp_path):
    store = CheckpointStore(tmp_path)
    left = store.begin(20, 1)
    left.mkdir()
    (left / MODEL_FILE).write_bytes(b"half")
    assert save(store, 20, 1).path.is_dir()
    (aside,) = store.folder.glob("*.killed-*")
    assert (aside / MODEL_FILE).read_bytes() == b"half"


def test_what_a_stopped_attempt_left_goes_when_a_newer_one_commits_the_step(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (20, 30):
        (store.folder / f"step-{step:08d}.writing-a1").mkdir(parents=True)
    for _ in range(2):
        attempt = store.acquire_attempt()
    save(store, 20, attempt)
    names = {path.name for path in store.folder.iterdir() if path.is_dir()}
    assert names == {"step-00000020", "step-00000030.writing-a1"}


def test_what_was_never_finished_cannot_be_committed(tmp_path):
    store = Store(tmp_path)
    store.begin(20).mkdir()
    with pytest.raises(DamagedCheckpointError, match="never finished"):
        store.commit(20)
    assert store.list() == []


def test_an_older_attempt_cannot_commit(tmp_path):
    zombie, store = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    first = zombie.acquire_attempt()
    save(zombie, 10, first)
    second = store.acquire_attempt()
    assert second == first + 1
    with pytest.raises(StaleAttempt, match=f"attempt {second}") as caught:
        save(zombie, 20, first)
    assert [each.step for each in store.list()] == [10]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    save(store, 20, second)


def test_an_attempt_overtaken_while_it_writes_cannot_commit(tmp_path):
    store = CheckpointStore(tmp_path)
    first = store.acquire_attempt()
    write_small(store.begin(20, first), 20)
    CheckpointStore(tmp_path).acquire_attempt()
    with pytest.raises(StaleAttempt):
        store.commit(20, first)
    assert store.list() == []


@pytest.mark.parametrize("left", [None, b"", b"\xff\0", b"one\n", b"1\n"])
def test_no_attempt_has_the_number_of_an_earlier_one_whatever_became_of_its_file(tmp_path, left):
    zombie = CheckpointStore(tmp_path)
    for number in (1, 2, 3):
        assert zombie.acquire_attempt() == number
        Journal(tmp_path).append("training_started", attempt=number)
    file = tmp_path / "attempt"
    file.unlink()
    if left is not None:
        file.write_bytes(left)
    assert CheckpointStore(tmp_path).acquire_attempt() == 4
    with pytest.raises(StaleAttempt):
        zombie.begin(10, 3)


def test_attempts_counted_by_many_processes_at_once_are_all_different(tmp_path):
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path\n"
        "from dmuon_platform.lease import Lease\n"
        "print(*[Lease(Path(sys.argv[1])).acquire() for _ in range(20)])\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), *[p for p in sys.path if p]]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    numbers = [int(n) for each in running for n in each.communicate()[0].split()]
    assert sorted(numbers) == list(range(1, 61))
