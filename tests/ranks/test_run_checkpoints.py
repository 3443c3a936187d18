"""The checkpoints of a run, saved beside its training and restored by real ranks."""

import io
import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from dmuon_platform.assembly import assemble
from dmuon_platform.data import ByteTokenizer, open_dataset, tokenizer_files
from dmuon_platform.errors import Diverged, PlatformError
from dmuon_platform.events import Journal
from dmuon_platform.export import export_model
from dmuon_platform.model import hf_config
from dmuon_platform.place import Place
from dmuon_platform.progress import ProgressView
from dmuon_platform.saving import Saving
from dmuon_platform.spec import JobSpec, job_of
from dmuon_platform.store import CheckpointStore
from dmuon_platform.training import Training
from dmuon_platform.worker import next_step
from ranks_runner import run_ranks
from rich.console import Console
from small_job import small
from unit.data_builders import build

import dmuon

WRITER = "dmuon.checkpoint.committing.write_tensors"
FACTS = {"dataset_digest": "a" * 64}


class Alone(Saving):
    """Saving without a Ray to mirror to."""

    def _mirror(self, step: int, path: Path) -> None:
        pass


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    documents = [bytes([65 + i % 26]) * (i % 50 + 1) for i in range(60)]
    build(tmp_path / "data", documents)
    model = {
        "vocab_size": 257,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return job_of(
        small(
            storage=str(tmp_path),
            model=model,
            data__sequence_length=8,
            train__global_batch_size=4,
            train__micro_batch_size=1,
            optimizer={"ns_dtype": "float32"},
            resources={"workers": 2},
            checkpoint={"keep_last": 2},
        )
    )


def prepare(spec: JobSpec) -> tuple[Place, Training]:
    place = Place.take(spec)
    model, optimizer, _ = assemble(spec, place)
    dataset = open_dataset(spec.run_dir.parent / "data")
    return place, Training(spec, place, model, optimizer, dataset)


def saving_of(
    spec: JobSpec, place: Place, attempt: int = 1, facts: Mapping[str, Any] = FACTS
) -> Saving:
    return Alone(spec, place, attempt, facts)


class Shown:
    """What the person who launched the job sees of what happens from now on."""

    def __init__(self, spec: JobSpec) -> None:
        self._console = Console(file=io.StringIO())
        self._view = ProgressView(spec, self._console)

    def text(self) -> str:
        self._view.refresh(last=True)
        assert isinstance(self._console.file, io.StringIO)
        return self._console.file.getvalue()


def steps_of(spec: JobSpec) -> list[int]:
    return [each.step for each in CheckpointStore(spec.run_dir).list()]


def train_and_save(spec: JobSpec, saving: Saving, training: Training, steps: range) -> None:
    for step in steps:
        metrics = training.step(step)
        saving.save(training, step + 1, metrics)


def test_a_checkpoint_is_committed_beside_the_training_once_all_ranks_have_written(spec) -> None:
    def body(rank: int) -> None:
        place, training = prepare(spec)
        saving = saving_of(spec, place)
        train_and_save(spec, saving, training, range(1))
        assert saving._pending is not None
        saving._pending.handle.wait()
        training.step(1, ready=saving.is_written and rank == 0)
        assert not training.all_ready
        training.step(2, ready=saving.is_written)
        assert training.all_ready
        saving.settle()
        training.step(3, ready=saving.is_written)
        assert not training.all_ready
        saving.finish()

    spec.run_dir.mkdir()
    run_ranks(2, body)
    assert steps_of(spec) == [1]
    (checkpoint,) = CheckpointStore(spec.run_dir).list()
    assert {"config.json", "model.safetensors.index.json"} <= checkpoint.manifest.files.keys()
    assert checkpoint.manifest.extra["metrics"]["train/loss"] > 0
    assert [e["step"] for e in Journal(spec.run_dir).read()] == [1]


def test_an_exported_checkpoint_is_the_same_folder_as_the_export_of_the_run(spec, tmp_path) -> None:
    def body(rank: int) -> None:
        place, training = prepare(spec)
        saving = saving_of(spec, place)
        saving.files = tokenizer_files(ByteTokenizer())
        train_and_save(spec, saving, training, range(1))
        saving.finish()

    spec.run_dir.mkdir()
    run_ranks(2, body)
    (newest,) = CheckpointStore(spec.run_dir).list()
    separator = open_dataset(tmp_path / "data").info.separator_id
    config = hf_config(spec.model, spec.data.sequence_length, separator)
    files = tokenizer_files(ByteTokenizer())
    export = export_model(spec.run_dir, newest.path, newest.manifest, config, files)
    dmuon.export_weights(newest.path, tmp_path / "out")
    small = {"config.json", "generation_config.json", *files}
    assert small == {file.name for file in (tmp_path / "out").iterdir() if "model" not in file.name}
    for name in small:
        assert (tmp_path / "out" / name).read_bytes() == (export.folder / name).read_bytes()
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": separator, "eos_token_id": separator}


def damage_a_copy_of_newest(spec: JobSpec) -> Path:
    """Leave a newer checkpoint that looks whole, with a changed byte; return that file."""
    newest = CheckpointStore(spec.run_dir).list()[-1].path
    copy = newest.with_name("step-00000099")
    shutil.copytree(newest, copy)
    damaged = copy / "model-00002-of-00002.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    return damaged


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_a_run_goes_on_from_the_newest_whole_checkpoint_with_any_workers(spec, num_workers) -> None:
    def before(rank: int) -> None:
        place, training = prepare(spec)
        saving = saving_of(spec, place)
        train_and_save(spec, saving, training, range(3))
        saving.finish()
        loss = training.step(3)["train/loss"]
        if rank == 0:
            (spec.run_dir / "loss").write_text(repr(loss))

    def after(rank: int) -> None:
        place, training = prepare(spec)
        saving = saving_of(spec, place, attempt=2)
        assert saving.restore(training) == 3
        loss = training.step(3)["train/loss"]
        expected = float((spec.run_dir / "loss").read_text())
        assert loss == (expected if num_workers == 2 else pytest.approx(expected, rel=1e-6))

    spec.run_dir.mkdir()
    run_ranks(2, before)
    assert steps_of(spec) == [2, 3]
    damaged = damage_a_copy_of_newest(spec)
    shown = Shown(spec)
    run_ranks(num_workers, after)
    (event,) = [e for e in Journal(spec.run_dir).read() if e["kind"] == "checkpoint_damaged"]
    assert str(damaged.parent) in event["damage"]
    assert damaged.name in event["damage"]
    assert f"{event['damage']}; it is passed over" in shown.text()
    assert damaged.exists()


def test_a_failed_save_is_noted_and_the_next_one_works_and_a_failed_last_one_is_an_error(
    spec,
) -> None:
    folder = spec.run_dir / "checkpoints"

    def body(rank: int) -> None:
        place, training = prepare(spec)
        saving = saving_of(spec, place)
        metrics = training.step(0)
        saving.save(training, 1, metrics)  # it is in the way, so nothing can be written
        saving.settle()
        if rank == 0:
            folder.unlink()
        saving.save(training, 2, metrics)
        saving.finish()
        if rank == 0:
            folder.rename(folder.with_name("elsewhere"))
            folder.touch()
        saving.save(training, 3, metrics)
        with pytest.raises(PlatformError, match="step 3"):
            saving.finish()

    spec.run_dir.mkdir()
    folder.touch()
    run_ranks(2, body)
    kinds = [(e["kind"], e["step"]) for e in Journal(spec.run_dir).read()]
    assert kinds == [("checkpoint_failed", 1), ("checkpoint_saved", 2), ("checkpoint_failed", 3)]


@pytest.mark.filterwarnings("ignore:no checkpoint was made")
def test_a_background_save_that_fails_is_noted_and_training_goes_on(spec, monkeypatch) -> None:
    def body(rank: int) -> None:
        place, training = prepare(spec)
        saving = saving_of(spec, place)
        metrics = training.step(0)
        if rank == 1:
            full = OSError(28, "No space left on device")
            monkeypatch.setattr(WRITER, _raise(full))
        saving.save(training, 1, metrics)
        saving.settle()
        if rank == 1:
            monkeypatch.undo()
        metrics = training.step(1)
        saving.save(training, 2, metrics)
        saving.finish()

    spec.run_dir.mkdir()
    shown = Shown(spec)
    run_ranks(2, body)
    failed, saved = Journal(spec.run_dir).read()
    assert "No space left" in failed["problem"]
    (line,) = shown.text().splitlines()
    assert line.startswith("the checkpoint of step 1 could not be saved, the next save tries again")
    assert failed["problem"] in line
    assert saved["kind"] == "checkpoint_saved"
    assert steps_of(spec) == [2]


def test_a_checkpoint_never_counts_before_the_metrics_of_its_steps_are_on_the_disk(spec) -> None:
    def body(rank: int) -> None:
        place, training = prepare(spec)
        full = [OSError(28, "No space left on device")]

        def write_metrics() -> None:
            assert rank == 0
            if full:
                raise full.pop()

        saving = Alone(spec, place, 1, FACTS, before_commit=write_metrics)
        train_and_save(spec, saving, training, range(2))
        saving.finish()

    spec.run_dir.mkdir()
    run_ranks(2, body)
    failed, saved = Journal(spec.run_dir).read()
    assert (failed["step"], saved["step"]) == (1, 2)
    assert "metrics" in failed["problem"]
    assert [each.name for each in (spec.run_dir / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.filterwarnings("ignore:no checkpoint was made")
def test_a_worker_killed_while_it_writes_leaves_the_older_checkpoint_and_a_named_folder(
    spec, monkeypatch
) -> None:
    def body(rank: int) -> None:
        place, training = prepare(spec)
        saving = saving_of(spec, place, attempt=1)
        saving.save(training, 1, {})
        saving.settle()
        if rank == 1:
            monkeypatch.setattr(WRITER, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        saving.save(training, 2, {})
        saving.settle()
        saving.save(training, 3, {})

    store = CheckpointStore(spec.run_dir)
    assert store.acquire_attempt() == 1
    with pytest.raises(AssertionError, match="rank 1"):
        run_ranks(2, body)
    store.acquire_attempt()
    with pytest.warns(UserWarning, match=r"step-00000002\.writing-a1"):
        newest = CheckpointStore(spec.run_dir).newest_verified()
    assert newest is not None
    assert newest.step == 1


def _raise(error: Exception) -> Any:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_weights_that_are_not_finite_on_one_rank_are_named_on_all_and_never_saved(spec) -> None:
    def body(rank: int) -> None:
        place, training = prepare(spec)
        saving = saving_of(spec, place)
        names = [
            "model.embed_tokens.weight",
            "model.layers.1.mlp.up_proj.weight",
            "model.norm.weight",
        ]
        assert dmuon.nonfinite_weights(training.model) == []
        weights = dmuon.get_model_state_dict(training.model)
        for name in names:
            weights[name].view(-1)[-1] = float("nan")
        dmuon.set_model_state_dict(training.model, weights)
        assert dmuon.nonfinite_weights(training.model) == names
        with pytest.raises(Diverged, match="embed_tokens"):
            saving.save(training, 1, {})

    spec.run_dir.mkdir()
    run_ranks(2, body)
    assert steps_of(spec) == []


def test_what_was_saved_before_a_run_diverged_is_committed(spec) -> None:
    def body(rank: int) -> None:
        place, training = prepare(spec)
        saving = saving_of(spec, place)
        saving.save(training, 1, {})
        weights = dmuon.get_model_state_dict(training.model)
        weights["model.norm.weight"].fill_(float("nan"))
        dmuon.set_model_state_dict(training.model, weights)
        with pytest.raises(Diverged):
            next_step(training, saving, 1)

    spec.run_dir.mkdir()
    run_ranks(2, body)
    assert steps_of(spec) == [1]


def test_to_go_back_behind_a_checkpoint_that_is_gone_is_said(spec) -> None:
    def before(rank: int) -> None:
        place, training = prepare(spec)
        saving = saving_of(spec, place)
        train_and_save(spec, saving, training, range(3))
        saving.finish()

    def after(rank: int) -> None:
        place, training = prepare(spec)
        assert saving_of(spec, place, attempt=2).restore(training) == max(steps_of(spec), default=0)

    spec.run_dir.mkdir()
    run_ranks(1, before)
    shown = Shown(spec)
    for step in (3, 2):
        shutil.rmtree(spec.run_dir / "checkpoints" / f"step-{step:08d}")
        run_ranks(1, after)
    events = [e for e in Journal(spec.run_dir).read() if e["kind"] == "went_back"]
    assert [(event["saved"], event["step"]) for event in events] == [(3, 2), (3, 0)]
    assert "step 3 is not there any more, or not whole: the training goes on from step 0" in (
        shown.text()
    )


def test_a_run_is_not_gone_on_with_from_another_dataset(spec) -> None:
    def body(rank: int) -> None:
        place, training = prepare(spec)
        saving = saving_of(spec, place)
        saving.save(training, 1, {})
        saving.finish()
        other = saving_of(spec, place, facts={"dataset_digest": "b" * 64})
        with pytest.raises(PlatformError, match="b" * 64):
            other.restore(training)

    spec.run_dir.mkdir()
    run_ranks(2, body)
