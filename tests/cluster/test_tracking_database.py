"""The default tracker, an SQLite file: what it is told, and the model that comes out of it."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from dmuon_platform.data.tokenizer import load_tokenizer, tokenizer_files
from dmuon_platform.events import Journal
from dmuon_platform.export import export_model
from dmuon_platform.model import build_model, hf_config
from dmuon_platform.store import CheckpointStore
from dmuon_platform.tracking import Tracker
from dmuon_platform.tracking_files import TrackingFiles
from mlflow_runs import drain_of, job, start_attempt, train
from unit.stored import MODEL_FILE, OPTIM_FILE, write_parts

pytestmark = pytest.mark.cluster

FACTS = {
    "git": {"commit": "c" * 40, "branch": "main", "dirty": False},
    "dataset": {"digest": "d" * 64, "folder": "/data", "train_tokens": 1000},
}


def small_job(tmp_path: Path, *, tied: bool = False, **sections):
    model = {
        "vocab_size": 257,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "tie_word_embeddings": tied,
    }
    return job(tmp_path / "runs", model=model, **sections)


def finish_training(spec, seed: int = 0):
    """Leave a checkpoint and an export of a fresh model; return the model."""
    torch.manual_seed(seed)
    model = build_model(spec.model, spec.data.sequence_length)
    tokenizer = load_tokenizer("bytes")
    config = hf_config(spec.model, spec.data.sequence_length, tokenizer.separator_id)
    files = {"config.json": json.dumps(config).encode()}
    store = CheckpointStore(spec.run_dir)
    tensors = {MODEL_FILE: dict(model.named_parameters()), OPTIM_FILE: {}}  # tied ones once
    write_parts(store.begin(50), 50, tensors, texts=files)
    saved = store.commit(50)
    export_model(spec.run_dir, saved.path, saved.manifest, config, tokenizer_files(tokenizer))
    return model


@pytest.fixture
def client_of(monkeypatch):
    """Clients that leave nothing of MLflow's global state behind."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # drains in this process set it
    before = mlflow.get_tracking_uri()
    yield lambda spec: mlflow.MlflowClient(f"sqlite:///{spec.run_dir.parent}/mlflow.db")
    mlflow.set_tracking_uri(before)


def test_what_is_tracked(tmp_path, monkeypatch, client_of):
    monkeypatch.chdir(tmp_path)
    spec = small_job(tmp_path)
    with Tracker(spec, FACTS) as tracker:
        start_attempt(spec, 1, 0)
        train(spec, 1, 50)
        finish_training(spec)
        delivery = tracker.finish("FINISHED")
    assert delivery.is_complete, delivery.problem
    assert delivery.run_id is not None
    client = client_of(spec)
    run = client.get_run(delivery.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["optimizer.lr"] == "0.02"
    assert run.data.tags["mlflow.source.git.commit"] == "c" * 40
    assert run.data.tags["dataset.digest"] == "d" * 64
    assert run.data.tags["attempt.1.workers"] == "2"
    assert run.inputs.dataset_inputs[0].dataset.digest == "d" * 36
    history = client.get_metric_history(delivery.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(s, 1 / s) for s in range(1, 51)]
    names = {each.path for each in client.list_artifacts(delivery.run_id)}
    assert {"job.toml", "facts.json", "plan", "checkpoints"} <= names
    plots = [Path(each.path) for each in client.list_artifacts(delivery.run_id, "plots")]
    assert [path.name for path in plots] == ["loss.png", "throughput.png"]
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_a_resumed_run_keeps_its_params_and_tags_what_has_changed(tmp_path, client_of):
    assert drain_of(small_job(tmp_path)).deliver()
    spec = small_job(tmp_path, resources={"workers": 1})
    assert drain_of(spec).deliver()
    assert drain_of(spec).deliver()
    client = client_of(spec)
    (run,) = client.search_runs([client.get_experiment_by_name("dmuon").experiment_id])
    assert run.data.params["resources.workers"] == "2"
    assert run.data.tags["changed.resources.workers"] == "1"


def test_what_the_tracker_refuses_keeps_nothing_else_back(tmp_path, client_of):
    spec = small_job(tmp_path)
    train(spec, 1, 3)
    Journal(spec.run_dir).append("training_started", attempt="a/../b\x00", step=0, plan={"x": 1})
    finish_training(spec)
    assert not drain_of(spec).deliver()
    delivered = TrackingFiles(spec.run_dir).delivered()
    assert delivered.problem is not None
    assert "its attempts" in delivered.problem
    assert delivered.model["version"] == "1"
    assert len(client_of(spec).get_metric_history(delivered.run_id, "train/loss")) == 3


def test_asked_again_after_any_interruption_there_is_one_version(tmp_path, client_of, monkeypatch):
    spec = small_job(tmp_path)
    finish_training(spec)
    steps = (
        "log_model_artifacts",
        "finalize_logged_model",
        "create_registered_model",
        "create_model_version",
        "set_logged_model_tags",
        "set_registered_model_alias",
    )
    for step in steps:
        with monkeypatch.context() as patch:
            real = getattr(mlflow.MlflowClient, step)

            def dies(*arguments, real=real, **options):
                real(*arguments, **options)
                raise ConnectionError("the answer was lost")

            patch.setattr(mlflow.MlflowClient, step, dies)
            drain_of(spec).deliver()
    assert drain_of(spec).deliver()
    client = client_of(spec)
    (version,) = client.search_model_versions("name = 'tracked-model'")
    experiment = client.get_experiment_by_name("dmuon").experiment_id
    (model,) = client.search_logged_models([experiment])
    assert str(model.status) == "READY"
    assert client.get_model_version_by_alias("tracked-model", "newest").version == version.version


def test_a_version_says_what_it_was_made_from_and_takes(tmp_path, client_of):
    spec = small_job(tmp_path)
    model = finish_training(spec)
    Journal(spec.run_dir).append("trained", step=50, weights_sha256="w" * 64)
    assert drain_of(spec, FACTS).deliver()
    version = client_of(spec).get_model_version_by_alias("tracked-model", "newest")
    checkpoint = spec.run_dir / "checkpoints" / "step-00000050"
    manifest = (checkpoint / "manifest.json").read_bytes()
    expected = {
        "dataset.digest": "d" * 64,
        "spec_digest": spec.digest(),
        "git.commit": "c" * 40,
        "git.dirty": "False",
        "checkpoint.uri": checkpoint.as_uri(),
        "checkpoint.manifest_sha256": hashlib.sha256(manifest).hexdigest(),
        "weights_sha256": "w" * 64,
    }
    assert expected.items() <= version.tags.items()
    mlflow.set_tracking_uri(f"sqlite:///{spec.run_dir.parent}/mlflow.db")
    info = mlflow.models.get_model_info("models:/tracked-model@newest")
    assert expected.items() <= info.metadata.items()
    (ids,), (logits,) = info.signature.inputs, info.signature.outputs
    assert (ids.name, ids.type, ids.shape) == ("input_ids", np.dtype("int64"), (-1, -1))
    out = model(torch.zeros(1, 3, dtype=torch.long)).logits
    assert (logits.name, logits.shape[2]) == ("logits", out.shape[2])


GENERATE = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
text = "caf\\u00e9 \\U0001f600\\n def f(x):"
ids = tokenizer(text)["input_ids"]
assert ids == list(text.encode()), ids
assert tokenizer.decode(ids) == text
out = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=8, do_sample=False)
print(*out[0].tolist()[len(ids):])
print(tokenizer.eos_token_id, model.generation_config.eos_token_id)
"""


@pytest.mark.parametrize("tied", [False, True])
def test_the_registered_model_generates_text_with_transformers_alone(tmp_path, client_of, tied):
    pytest.importorskip("transformers")
    spec = small_job(tmp_path, tied=tied)
    model = finish_training(spec)
    assert drain_of(spec).deliver()
    mlflow.set_tracking_uri(f"sqlite:///{spec.run_dir.parent}/mlflow.db")
    folder = mlflow.artifacts.download_artifacts(
        "models:/tracked-model@newest", dst_path=str(tmp_path / "downloaded")
    )
    command = [sys.executable, "-I", "-c", GENERATE, folder]  # without us on its path
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    generated, ends = done.stdout.splitlines()
    separator = load_tokenizer("bytes").separator_id
    assert ends == f"{separator} {separator}"
    ids = list("caf\u00e9 \U0001f600\n def f(x):".encode())
    mine = []
    with torch.no_grad():
        for _ in range(8):
            mine.append(int(model(torch.tensor([ids + mine])).logits[0, -1].argmax()))
            if mine[-1] == separator:
                break
    assert [int(each) for each in generated.split()] == mine
