"""The check at the end of chaos finds whatever is not as in an undisturbed run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from dmuon_platform.data import Dataset, open_dataset
from dmuon_platform.events import Journal
from dmuon_platform.run_comparison import compare
from dmuon_platform.spec import JobSpec
from dmuon_platform.store import CheckpointStore
from ranks_runner import run_ranks
from worker_runs import run_worker, worker_job

STEPS = 120  # two epochs and a part


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    folder = tmp_path_factory.mktemp("undisturbed")
    spec = worker_job(
        folder, train__steps=STEPS, checkpoint={"every": 40}, evaluation={"every": 60}
    )
    run_ranks(2, lambda rank: run_worker(spec) and None, timeout_s=120)
    return spec


@pytest.fixture
def dataset(undisturbed: JobSpec) -> Dataset:
    return open_dataset(undisturbed.run_dir.parent / "data")


def _change_metrics(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    def act(run_dir: Path) -> None:
        file = run_dir / "metrics.jsonl"
        file.write_text("\n".join(change(file.read_text().splitlines())) + "\n")

    return act


def _next_float(lines: list[str]) -> list[str]:
    line = json.loads(lines[9])
    line["metrics"]["train/loss"] *= 1 + 2**-52
    return [*lines[:9], json.dumps(line), *lines[10:]]


def _flip(run_dir: Path) -> None:
    file = next(iter(sorted((run_dir / "checkpoints/step-00000080").glob("optim-*"))))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def _other_weights(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints/step-00000120")


class Doubling(Dataset):
    """A dataset whose order gives some samples twice and others never."""

    def sample_numbers(self, places, seed):
        return super().sample_numbers(places, seed) // 2


def broken(checks) -> list[str]:
    return [check.claim for check in checks if not check.holds]


@pytest.mark.parametrize(
    ("damage", "claims"),
    [
        (lambda run_dir: None, []),
        (_change_metrics(_next_float), ["every step has the metrics of the undisturbed run"]),
        (
            _change_metrics(lambda lines: [*lines[:9], *lines[10:]]),
            ["every step has the metrics", "every sample comes once an epoch"],
        ),
        (
            _change_metrics(lambda x: [*x, '{"step": 5, "time": 0, "replay": {"a": [1, 2]}}']),
            ["every step that was done again had the same bits"],
        ),
        (
            _change_metrics(lambda x: ['{"step": 0, "time": 0, "metrics": {"train/x": 1}}', *x]),
            ["every step has the metrics"],
        ),
        (_flip, ["every checkpoint that counts is whole and finite"]),
        (_other_weights, ["the weights are those of the undisturbed run"]),
    ],
    ids=[
        "nothing",
        "one bit of a loss",
        "a step less",
        "a replay",
        "a start",
        "a checkpoint",
        "weights",
    ],
)
def test_what_is_different_is_found_and_nothing_else(
    undisturbed, dataset, tmp_path, damage, claims
):
    copy = undisturbed.model_copy(update={"name": "copy", "storage": str(tmp_path)})
    shutil.copytree(undisturbed.run_dir, copy.run_dir)
    damage(copy.run_dir)
    found = broken(compare(copy, undisturbed, dataset))
    assert len(found) == len(claims)
    assert all(each.startswith(claim) for each, claim in zip(found, claims, strict=True))


def test_a_damaged_checkpoint_that_the_run_has_named_is_no_bad_one(undisturbed, dataset, tmp_path):
    copy = undisturbed.model_copy(update={"name": "copy", "storage": str(tmp_path)})
    shutil.copytree(undisturbed.run_dir, copy.run_dir)
    _flip(copy.run_dir)
    path = CheckpointStore(copy.run_dir).folder / "step-00000080"
    Journal(copy.run_dir).append("checkpoint_damaged", damage=f"{path} is not a whole checkpoint")
    assert broken(compare(copy, undisturbed, dataset)) == []


def test_samples_that_come_twice_or_never_in_an_epoch_are_found(undisturbed, dataset):
    wrong = Doubling(dataset.info)
    (check,) = [each for each in compare(undisturbed, undisturbed, wrong) if not each.holds]
    assert check.claim == "every sample comes once an epoch"
    found = {" ".join(each.split()[-2:]) for each in check.against}
    assert found == {"2 times", "is missing"}
