"""Every committed checkpoint is in MLflow: its manifest, place and digest, linked to its step."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from dmuon_platform.spec import JobSpec
from dmuon_platform.spec.checkpoint import CheckpointSpec
from dmuon_platform.store import CheckpointStore
from dmuon_platform.tracked_run import TrackedRun
from dmuon_platform.tracking import Tracker
from dmuon_platform.tracking_files import TrackingFiles
from mlflow_runs import drain_of, history, job, train, wait_for
from unit.stored import MODEL_FILE, OPTIM_FILE, save, save_many, weights, write_parts

import dmuon

pytestmark = pytest.mark.cluster

LAST_TWO = CheckpointSpec(every=1, keep_last=2)
CURVE = "checkpoint/megabytes"
NORM = "model.norm.weight"


@pytest.fixture(autouse=True)
def uri_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # drains in this process set it
    before = mlflow.get_tracking_uri()
    yield
    mlflow.set_tracking_uri(before)


def save_and_prune(spec: JobSpec, *steps: int) -> dict[int, bytes]:
    """As a training does; returns the manifests, which may be pruned by now."""
    store = CheckpointStore(spec.run_dir)
    manifests = {}
    for step in steps:
        manifests[step] = (save(store, step).path / "manifest.json").read_bytes()
        store.prune(LAST_TWO)
    return manifests


class Tracked:
    """What MLflow has of a run."""

    def __init__(self, spec: JobSpec) -> None:
        files = TrackingFiles(spec.run_dir)
        self._uri = files.description().uri
        self.run_id = files.delivered().run_id or ""
        self._client = mlflow.MlflowClient(self._uri)

    @property
    def tags(self) -> dict[str, str]:
        return self._client.get_run(self.run_id).data.tags

    def points(self) -> list[tuple[int, float]]:
        return history(self._uri, self.run_id, CURVE)

    def names(self, folder: str) -> set[str]:
        found = self._client.list_artifacts(self.run_id, folder)
        return {Path(each.path).name for each in found}

    def read(self, path: str, scratch: Path) -> bytes:
        scratch.mkdir(exist_ok=True)
        return Path(self._client.download_artifacts(self.run_id, path, str(scratch))).read_bytes()


def expect_all(spec: JobSpec, manifests: dict[int, bytes], scratch: Path) -> Tracked:
    tracked = Tracked(spec)
    expected = set()
    for step, data in manifests.items():
        folder = f"step-{step:08d}"
        assert tracked.read(f"checkpoints/{folder}/manifest.json", scratch) == data
        manifest = dmuon.Manifest.from_json(data.decode())
        place = json.loads(tracked.read(f"checkpoints/{folder}/location.json", scratch))
        assert place["uri"] == (spec.run_dir / "checkpoints" / folder).as_uri()
        assert (place["step"], place["sha256"]) == (step, manifest.digest())
        expected.add((step, sum(facts.size for facts in manifest.files.values()) / 1e6))
    assert sorted(tracked.points()) == sorted(expected)
    newest = max(manifests)
    assert tracked.tags["checkpoint.newest_step"] == str(newest)
    sha256 = dmuon.Manifest.from_json(manifests[newest].decode()).digest()
    assert tracked.tags["checkpoint.newest_sha256"] == sha256
    return tracked


def test_a_pruned_checkpoint_keeps_its_record_and_all_are_told_once(tmp_path):
    spec = job(tmp_path / "runs")
    manifests = save_and_prune(spec, 10, 20, 30)
    assert drain_of(spec).deliver()
    manifests |= save_and_prune(spec, 40, 50)
    drain = drain_of(spec)
    assert drain.deliver()
    assert drain.deliver()
    assert not (spec.run_dir / "checkpoints" / "step-00000010").exists()
    tracked = expect_all(spec, manifests, tmp_path / "scratch")
    assert tracked.names("checkpoints/step-00000050") == {"manifest.json", "location.json"}


def test_through_a_server_that_is_killed_and_restarted_every_checkpoint_arrives_once(
    server, tmp_path
):
    spec = job(tmp_path / "runs", server.uri)
    files = TrackingFiles(spec.run_dir)
    with Tracker(spec, {}) as tracker:
        manifests = save_and_prune(spec, 1, 2, 3)
        wait_for(lambda: files.delivered().recorded > 0)
        server.kill()
        manifests |= save_and_prune(spec, 4, 5, 6)
        wait_for(lambda: files.delivered().problem is not None)
        server.start()
        manifests |= save_and_prune(spec, 7)
        delivery = tracker.finish("FINISHED")
    assert delivery.is_complete, delivery.problem
    expect_all(spec, manifests, tmp_path / "scratch")
    for state in ({"recorded": 0, "copied": 0}, {"recorded": 0, "copied": 0, "offsets": {}}):
        lost = files.delivered()  # more was told than was written down
        vars(lost).update(state)
        files.save(lost)
        assert drain_of(spec).deliver()
        expect_all(spec, manifests, tmp_path / "scratch")


def test_a_step_that_is_saved_once_more_is_told_with_its_later_manifest(tmp_path):
    spec = job(tmp_path / "runs")
    manifests = save_and_prune(spec, 1, 2)
    assert drain_of(spec).deliver()
    store = CheckpointStore(spec.run_dir)
    (store.folder / "step-00000002" / MODEL_FILE).unlink()
    with pytest.warns(UserWarning, match="step-00000002"):
        assert store.newest_verified() is not None
    (again,) = save_and_prune(spec, 2).values()
    assert again != manifests[2]
    assert drain_of(spec).deliver()
    expect_all(spec, manifests | {2: again}, tmp_path / "scratch")


@pytest.mark.parametrize("wanted", ["weights", "full"])
def test_files_are_copied_as_wanted_and_those_pruned_before_are_named(tmp_path, wanted):
    spec = job(tmp_path / "runs", tracking={"checkpoint_artifacts": wanted})
    manifests = save_and_prune(spec, 1, 2, 3)
    assert drain_of(spec).deliver()
    tracked = expect_all(spec, manifests, tmp_path / "scratch")
    record = {"manifest.json", "location.json"}
    assert tracked.names("checkpoints/step-00000001") == record
    copied = {MODEL_FILE} | ({OPTIM_FILE} if wanted == "full" else set())
    for step in (2, 3):
        assert tracked.names(f"checkpoints/step-{step:08d}") == record | copied
    assert tracked.tags["checkpoint.not_copied"].endswith(": step-00000001")


def test_all_but_the_optimizer_is_copied_with_the_weights(tmp_path):
    spec = job(tmp_path / "runs", tracking={"checkpoint_artifacts": "weights"})
    store = CheckpointStore(spec.run_dir)
    files = {MODEL_FILE: weights(), OPTIM_FILE: {f"exp_avg/{NORM}": weights()[NORM]}}
    texts = {"config.json": b"{}", "chat_template.jinja": b"{{ messages }}"}
    write_parts(store.begin(1, None), 1, files, texts=texts)
    store.commit(1, None)
    assert drain_of(spec).deliver()
    record = {"manifest.json", "location.json"}
    copied = Tracked(spec).names("checkpoints/step-00000001")
    assert copied == record | {MODEL_FILE} | texts.keys()


def test_while_files_are_copied_all_else_goes_on_being_told(tmp_path, monkeypatch):
    spec = job(tmp_path / "runs", tracking={"checkpoint_artifacts": "full"})
    save_and_prune(spec, 1)
    monkeypatch.setattr("dmuon_platform.drain.EVERY_S", 0.0)
    uri = TrackingFiles(spec.run_dir).description
    log_file = TrackedRun.log_file
    told: list[int] = []

    def copies_for_long(self: TrackedRun, file: Path, path: str) -> None:
        told.append(len(history(uri().uri, self.run_id, "train/loss")))
        train(spec, len(told), len(told))
        log_file(self, file, path)

    monkeypatch.setattr(TrackedRun, "log_file", copies_for_long)
    assert drain_of(spec).deliver()
    assert told == [0, 1]


def test_many_checkpoints_are_told_in_few_requests_and_none_when_nothing_is_new(
    tmp_path, monkeypatch
):
    spec = job(tmp_path / "runs")
    save_many(CheckpointStore(spec.run_dir), dict.fromkeys(range(1, 251)))
    CheckpointStore(spec.run_dir).prune(CheckpointSpec(every=1, keep_every=1))
    calls: Counter[str] = Counter()
    for name in ("log_artifacts", "log_batch"):
        real = getattr(mlflow.MlflowClient, name)

        def counted(*arguments, name=name, real=real, **options):
            calls[name] += 1
            return real(*arguments, **options)

        monkeypatch.setattr(mlflow.MlflowClient, name, counted)
    drain = drain_of(spec)
    assert drain.deliver()
    assert calls["log_artifacts"] == 3
    assert calls["log_batch"] < 15
    calls.clear()
    assert drain.deliver()
    assert not calls
    assert len(Tracked(spec).points()) == 250
