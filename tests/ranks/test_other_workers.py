"""A run that goes on with fewer workers, and with more: the same samples, the same weights."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from dmuon_platform.data import open_dataset
from dmuon_platform.errors import PlatformError
from dmuon_platform.events import Journal
from dmuon_platform.spec import JobSpec
from dmuon_platform.stop_request import After, StopFile
from dmuon_platform.store import CheckpointStore
from ranks_runner import run_ranks
from safetensors import safe_open
from worker_runs import ask_to_stop, run_worker, samples_read, worker_job

STEPS = 24


def weights_of(spec: JobSpec) -> dict[str, torch.Tensor]:
    newest = CheckpointStore(spec.run_dir).newest_verified()
    assert newest.step == STEPS
    weights = {}
    for path in newest.path.glob("model-*.safetensors"):
        with safe_open(path, "pt") as file:
            weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return weights


def assert_each_sample_once_an_epoch(done: dict[int, list[int]], num_samples: int) -> None:
    read = [number for step in range(STEPS) for number in done[step]]
    num_epochs, rest = divmod(len(read), num_samples)
    times = [read.count(number) for number in range(num_samples)]
    assert num_epochs >= 1
    assert set(times) <= {num_epochs, num_epochs + 1}
    assert times.count(num_epochs + 1) == rest


def test_machines_lost_and_added_change_neither_samples_nor_weights(tmp_path: Path) -> None:
    changes = {"train__steps": STEPS, "train__global_batch_size": 16, "checkpoint": {"every": 3}}
    spec = worker_job(tmp_path, **changes)
    undisturbed = worker_job(tmp_path, "undisturbed", **changes)

    def lose_two(rank: int) -> None:
        kill = partial(os.kill, os.getpid(), signal.SIGKILL)
        run_worker(spec, 1, 8 if rank in (2, 3) else -1, kill)

    def grow(rank: int) -> None:
        ask = partial(ask_to_stop, spec, "room for 4", After.RESTART)
        stopped = run_worker(spec, 2, 15 if rank == 0 else -1, ask)["stopped"]
        assert (stopped["after"], stopped["step"]) == (After.RESTART, 17)

    with pytest.raises(AssertionError, match="died without a traceback"):
        run_ranks(4, lose_two)
    run_ranks(2, grow)
    StopFile(spec.run_dir).remove()
    run_ranks(4, lambda rank: run_worker(spec, 3) and None)
    run_ranks(4, lambda rank: run_worker(undisturbed) and None)

    first, second, third = (samples_read(spec, number) for number in (1, 2, 3))
    assert min(second) <= 8, "steps after the checkpoint were done again"
    assert min(third) == 17, "and none after a checkpoint on request"
    done = {**first, **second, **third}  # the last time that each was done
    assert done == samples_read(undisturbed, 1)
    dataset = open_dataset(tmp_path / "data")
    assert_each_sample_once_an_epoch(done, dataset.info.num_train_sequences)
    weights, others = weights_of(spec), weights_of(undisturbed)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], atol=1e-4, rtol=1e-4, msg=name)


def test_workers_that_live_on_while_a_newer_attempt_has_begun_commit_nothing(tmp_path) -> None:
    spec = worker_job(tmp_path, train__steps=12, checkpoint={"every": 3})
    undisturbed = worker_job(tmp_path, "undisturbed", train__steps=12, checkpoint={"every": 3})
    store = CheckpointStore(spec.run_dir)

    def zombie(rank: int) -> None:
        with pytest.raises(PlatformError) as caught:
            run_worker(spec, 1, 7 if rank == 0 else -1, store.acquire_attempt)
        assert "attempt 2 has taken the run over" in str(caught.value)

    assert store.acquire_attempt() == 1
    run_ranks(2, zombie)
    assert {each.step for each in store.list()} <= {3, 6}
    run_ranks(2, lambda rank: run_worker(spec, 2) and None)
    run_ranks(2, lambda rank: run_worker(undisturbed) and None)
    both = (spec, undisturbed)
    digests = [Journal(each.run_dir).last("trained")["weights_sha256"] for each in both]
    assert digests[0] == digests[1]
