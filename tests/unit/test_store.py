"""Checkpoints: what is saved comes back exactly, and what is not whole is named and passed over."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dmuon_platform.lease import StaleAttempt
from dmuon_platform.manifest import DamagedCheckpoint
from dmuon_platform.store import Checkpoint, CheckpointStore


def model_sd(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(7, 4, generator=generator),
        "model.layers.0.mlp.up_proj.weight": torch.randn(5, 4, generator=generator).bfloat16(),
        "model.norm.weight": torch.ones(4),
        "lm_head.weight": torch.randn(7, 4, generator=generator),
    }


def optim_sd(seed: int = 0) -> dict[str, object]:
    generator = torch.Generator().manual_seed(100 + seed)
    moments = {
        "exp_avg": torch.randn(4, generator=generator),
        "exp_avg_sq": torch.rand(4, generator=generator),
        "step": torch.tensor(3.0),
    }
    momentum = torch.randn(5, 4, generator=generator)
    groups = [
        {"algorithm": "muon", "lr": 0.1 + 0.2, "names": ["model.layers.0.mlp.up_proj.weight"]},
        {"algorithm": "adamw", "betas": (0.9, 0.95), "lr": 1e-3, "ns_dtype": None},
    ]
    return {
        "fsdp2": {"model.norm.weight": moments},
        "dedicated": {
            "model.layers.0.mlp.up_proj.weight": {
                "momentum_buffer": momentum,
                "master_weight": momentum * 2,
            }
        },
        "param_groups": groups,
        "num_steps": 3,
    }


def assert_same(was: object, now: object) -> None:
    assert type(was) is type(now)
    if isinstance(was, torch.Tensor):
        assert isinstance(now, torch.Tensor)
        assert was.dtype == now.dtype
        assert torch.equal(was, now)
    elif isinstance(was, dict):
        assert isinstance(now, dict)
        assert was.keys() == now.keys()
        for key in was:
            assert_same(was[key], now[key])
    elif isinstance(was, (list, tuple)):
        assert isinstance(now, (list, tuple))
        for one, other in zip(was, now, strict=True):
            assert_same(one, other)
    else:
        assert was == now


class Store(CheckpointStore):
    """A store that remembers what it passed over."""

    def __init__(self, run_dir: Path) -> None:
        self.damages: list[DamagedCheckpoint] = []
        super().__init__(run_dir, self.damages.append)


def save(store: CheckpointStore, step: int, attempt: int | None = None) -> Checkpoint:
    return store.save(step, model_sd(step), optim_sd(step), {"loss": 1.5}, {}, attempt=attempt)


def newest(run_dir: Path) -> tuple[Checkpoint | None, list[DamagedCheckpoint]]:
    store = Store(run_dir)
    return store.newest_verified(), store.damages


def test_what_is_saved_is_what_comes_back(tmp_path):
    save(CheckpointStore(tmp_path), 3)
    store = CheckpointStore(tmp_path)
    checkpoint = store.newest_verified()
    assert checkpoint is not None
    model, optimizer, extra = store.load(checkpoint)
    assert_same(model_sd(3), model)
    assert_same(optim_sd(3), optimizer)
    assert extra == {"loss": 1.5}


def test_tensors_have_documented_names_and_files(tmp_path):
    manifest = save(CheckpointStore(tmp_path), 3).manifest
    assert manifest.tensors["model.norm.weight"] == "model.safetensors"
    assert manifest.tensors["exp_avg/model.norm.weight"] == "optim.safetensors"
    name = "momentum_buffer/model.layers.0.mlp.up_proj.weight"
    assert manifest.tensors[name] == "optim.safetensors"


def test_views_of_one_buffer_can_be_saved(tmp_path):
    flat = torch.arange(8.0)
    store = CheckpointStore(tmp_path)
    saved = store.save(1, {"a": flat[:4].view(2, 2), "b": flat[4:]}, {}, {}, {})
    model, _, _ = store.load(saved)
    assert_same({"a": flat[:4].view(2, 2), "b": flat[4:]}, model)


@pytest.mark.parametrize("copies", [False, True])
def test_a_tied_head_is_written_once_and_comes_back_under_both_names(tmp_path, copies):
    model = model_sd()
    embedding = model["model.embed_tokens.weight"]
    model["lm_head.weight"] = embedding.clone() if copies else embedding
    files = {"config.json": json.dumps({"tie_word_embeddings": True}).encode()}
    store = CheckpointStore(tmp_path)
    saved = store.save(1, model, {}, {}, files)
    assert "lm_head.weight" not in saved.manifest.tensors
    assert_same(dict(sorted(model.items())), dict(sorted(store.load(saved)[0].items())))


def test_equal_weights_that_are_not_tied_are_both_written(tmp_path):
    model = {"a.weight": torch.ones(3), "b.weight": torch.ones(3)}
    saved = CheckpointStore(tmp_path).save(1, model, {}, {}, {})
    assert saved.manifest.tensors.keys() == model.keys()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a flipped byte of the model": lambda path: flip(path / "model.safetensors"),
    "a flipped byte of the optimizer": lambda path: flip(path / "optim.safetensors"),
    "a cut file": lambda path: os.truncate(path / "optim.safetensors", 100),
    "a missing file": lambda path: (path / "model.safetensors").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "an empty manifest": lambda path: (path / "manifest.json").write_text(""),
    "a cut manifest": lambda path: os.truncate(path / "manifest.json", 200),
    "a manifest of something else": lambda path: (path / "manifest.json").write_text("[1]"),
    "a manifest from the future": lambda path: (path / "manifest.json").write_text(
        (path / "manifest.json").read_text().replace('"format_version": 1', '"format_version": 9')
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


def test_the_default_is_to_warn_of_damage(tmp_path):
    bad = save(CheckpointStore(tmp_path), 10).path
    (bad / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="step-00000010"):
        assert CheckpointStore(tmp_path).newest_verified() is None


def test_damaged_checkpoints_survive_pruning_and_saving_the_same_step_again(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    bad = save(store, 20).path
    flip(bad / "model.safetensors")
    damaged = (bad / "model.safetensors").read_bytes()
    restarted = Store(tmp_path)
    restarted.newest_verified()
    for step in (15, 20, 30, 40):
        save(restarted, step)
        restarted.prune(1)
    assert [each.step for each in restarted.list()] == [40]
    (aside,) = restarted.folder.glob("step-00000020.replaced-*")
    assert (aside / "model.safetensors").read_bytes() == damaged


def test_contents_once_found_changed_are_never_pruned_by_later_processes(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    bad = save(store, 20).path
    flip(bad / "model.safetensors")
    newest(tmp_path)
    later = CheckpointStore(tmp_path)
    save(later, 30)
    CheckpointStore(tmp_path).prune(1)
    assert bad.is_dir()
    assert not (store.folder / "step-00000010").exists()


def test_pruning_keeps_the_newest_and_their_manifests_stay(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3, 4):
        save(store, step)
    store.prune(2)
    assert [each.step for each in store.list()] == [3, 4]
    assert len(list((tmp_path / "manifests").glob("*.json"))) == 4


def test_pruning_never_removes_the_newest_verified(tmp_path):
    store = CheckpointStore(tmp_path)
    good = save(store, 1).path
    for step in (2, 3):
        flip(save(store, step).path / "model.safetensors")
    fresh = Store(tmp_path)  # a new process, which has verified nothing yet
    fresh.prune(1)
    assert good.is_dir()
    assert len(fresh.damages) == 2


def test_killed_at_any_moment_of_a_save_the_older_checkpoint_is_used(tmp_path):
    for moment in ("save_file", "facts_of", "write_whole", "_commit"):
        run_dir = tmp_path / moment
        save(CheckpointStore(run_dir), 10)
        owner = "store.CheckpointStore" if moment == "_commit" else "store"
        script = (
            "import os, sys; sys.path[:0] = sys.argv[2:]\n"
            "from pathlib import Path\n"
            "from unit import test_store\n"
            "from dmuon_platform import store\n"
            f"{owner}.{moment} = lambda *a, **k: os.kill(os.getpid(), 9)\n"
            "s = store.CheckpointStore(Path(sys.argv[1]))\n"
            "test_store.save(s, 20, s.acquire_attempt())\n"
        )
        paths = [p for p in sys.path if p]
        done = subprocess.run([sys.executable, "-c", script, run_dir, *paths], check=False)
        assert done.returncode == -9
        CheckpointStore(run_dir).acquire_attempt()
        checkpoint, damages = newest(run_dir)
        assert checkpoint is not None
        assert checkpoint.step == 10
        assert [each.path.name for each in damages] == ["step-00000020.writing-a1"]
        assert damages[0].path.is_dir()


def test_a_full_disk_leaves_nothing_behind_and_the_next_save_works(tmp_path, monkeypatch):
    store = Store(tmp_path)
    save(store, 10)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dmuon_platform.store.write_whole", full)
        with pytest.raises(OSError, match="No space"):
            save(store, 20)
    assert [path.name for path in store.folder.iterdir()] == ["step-00000010"]
    save(store, 30)
    assert [each.step for each in store.list()] == [10, 30]


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


def test_an_attempt_overtaken_while_it_writes_cannot_commit(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    first = store.acquire_attempt()
    from dmuon_platform import store as module

    def overtaken(path: Path) -> object:
        CheckpointStore(tmp_path).acquire_attempt()
        return facts_of(path)

    facts_of = module.facts_of
    monkeypatch.setattr(module, "facts_of", overtaken)
    with pytest.raises(StaleAttempt):
        save(store, 20, first)
    assert store.list() == []


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
