"""What the workers of a run do, on forked ranks and without Ray."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from dmuon_platform.assembly import assemble
from dmuon_platform.data import Dataset, open_dataset
from dmuon_platform.heartbeat import Heartbeats
from dmuon_platform.place import Place
from dmuon_platform.pulse import Pulse, catch_sigterm
from dmuon_platform.record import Record
from dmuon_platform.saving import Saving
from dmuon_platform.spec import JobSpec, job_of
from dmuon_platform.stop_request import After, StopFile, StopRequest
from dmuon_platform.training import Training
from dmuon_platform.worker import train
from ranks_runner import run_ranks
from small_job import small
from unit.data_builders import build

LAUNCH = "launch"


class Alone(Saving):
    """Saving without a Ray to mirror to."""

    def _mirror(self, step: int, path: Path) -> None:
        pass


class Watched(Dataset):
    """The dataset, which notes what is read, and with something that happens at one step."""

    notes: Path
    at_step = -1
    action: Callable[[], None]

    def batch(self, step: int, *arguments: Any) -> Any:
        if step == self.at_step:
            self.action()
        self.step = step
        return super().batch(step, *arguments)

    def sample_numbers(self, places: Any, seed: int) -> Any:
        numbers = super().sample_numbers(places, seed)
        with self.notes.open("a") as file:
            file.write(json.dumps([self.step, np.asarray(numbers).tolist()]) + "\n")
        return numbers


def worker_job(folder: Path, name: str = "small", **changes: Any) -> JobSpec:
    """Return a tiny job whose data and run folder are there."""
    if not (folder / "data").exists():
        build(folder / "data", [bytes([65 + i % 26]) * (i % 50 + 1) for i in range(60)])
    model = {
        "vocab_size": 257,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    document = {
        "name": name,
        "storage": str(folder),
        "model": model,
        "data__sequence_length": 8,
        "train__steps": 12,
        "train__global_batch_size": 4,
        "train__micro_batch_size": 1,
        "optimizer": {"ns_dtype": "float32"},
        "resources": {"workers": {"min": 1, "max": 4}},
    }
    spec = job_of(small(**document | changes))
    spec.run_dir.mkdir()
    return spec


def run_worker(
    spec: JobSpec,
    attempt: int = 1,
    at_step: int = -1,
    action: Callable[[], None] = lambda: None,
    data: Path | None = None,
) -> dict[str, Any]:
    """Train as a worker does; ``action`` happens in this rank's loader at one step.

    The dataset is that of `worker_job` unless there is another.
    """
    place = Place.take(spec)
    with Pulse(spec.run_dir, spec.faults, place, attempt, LAUNCH) as pulse:
        model, optimizer, plan = assemble(spec, place)
        dataset = open_dataset(data or spec.run_dir.parent / "data")
        dataset.__class__ = Watched
        dataset.notes = spec.run_dir / f"samples-{attempt}-{place.rank}-{os.getpid()}.jsonl"
        dataset.at_step, dataset.action = at_step, action
        training = Training(spec, place, model, optimizer, dataset, pulse.at)
        saving = Alone(spec, place, attempt, {}, pulse.at)
        return train(spec, training, saving, pulse, Record(spec, place, attempt), plan)


def run_on_forked_ranks(spec: JobSpec, data: Path) -> None:
    """Train a job whose workers are two, as Ray's would, in its own folder of a run."""

    def body(rank: int) -> None:
        catch_sigterm()
        run_worker(spec, data=data)

    spec.run_dir.mkdir(exist_ok=True)
    run_ranks(2, body, timeout_s=120)


def ask_to_stop(spec: JobSpec, reason: str, after: After = After.END) -> None:
    """Ask in the file, and return when rank 0 has seen it: it looks before each of its beats."""
    beats = Heartbeats(spec.run_dir)
    StopFile(spec.run_dir).write(StopRequest.now(LAUNCH, reason, after))
    seen = {beats.read()[0].time}
    while len(seen) < 3:  # it may just have looked when it wrote the first of them
        time.sleep(0.05)
        seen.add(beats.read()[0].time)


def samples_read(spec: JobSpec, attempt: int) -> dict[int, list[int]]:
    """Return what all ranks of an attempt have read for each step, sorted."""
    read: dict[int, list[int]] = {}
    for path in spec.run_dir.glob(f"samples-{attempt}-*.jsonl"):
        for line in path.read_text().splitlines():
            step, numbers = json.loads(line)
            read.setdefault(step, []).extend(numbers)
    return {step: sorted(numbers) for step, numbers in read.items()}
