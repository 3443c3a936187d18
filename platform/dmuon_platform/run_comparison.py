"""Whether a run that things happened to came to the same as one that nothing happened to."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import dmuon
from dmuon_platform.batch_order import BatchOrder
from dmuon_platform.data import Dataset
from dmuon_platform.events import Journal
from dmuon_platform.line_file import LineFile
from dmuon_platform.metric_names import EVALUATION, TRAIN
from dmuon_platform.run_story import ROLLED_BACK
from dmuon_platform.spec import JobSpec
from dmuon_platform.spool import METRICS_FILE, MetricsSpool
from dmuon_platform.store import Checkpoint, CheckpointStore
from dmuon_platform.weights_digest import digest_of_checkpoint, nonfinite_in

COMPUTED = (TRAIN, EVALUATION)
"""Prefixes of the metrics that no clock has a part in."""


@dataclass(frozen=True)
class Check:
    """One claim about a run, and what speaks against it."""

    claim: str
    against: Sequence[str] = ()

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.against


def compare(spec: JobSpec, undisturbed: JobSpec, dataset: Dataset) -> list[Check]:
    """Check a finished run; both have the same mesh, and read all of their checkpoints.

    Args:
        spec: Of the run to check.
        undisturbed: The same job without faults, also finished.
        dataset: Of both.
    """
    steps = computed_metrics(spec.run_dir)
    done = [step for step in steps if step]  # 0 is what was known before the first
    return [
        Check("every step has the metrics of the undisturbed run", _unequal(steps, undisturbed)),
        Check("every step that was done again had the same bits", _replays(spec.run_dir)),
        Check("the weights are those of the undisturbed run", _digests(spec, undisturbed)),
        Check(
            "every sample comes once an epoch",
            sample_problems(spec, done, dataset),
        ),
        Check("every checkpoint that counts is whole and finite", _bad_checkpoints(spec.run_dir)),
    ]


def computed_metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return what each step of a run has computed, as it counts, by steps done."""
    records, _ = MetricsSpool(run_dir).read_from(0)
    steps: dict[int, dict[str, float]] = {}
    for record in records:
        mine = {k: v for k, v in record.metrics.items() if k.startswith(COMPUTED)}
        steps.setdefault(record.step, {}).update(mine)
    return steps


def _unequal(steps: Mapping[int, Mapping[str, float]], undisturbed: JobSpec) -> list[str]:
    wanted = computed_metrics(undisturbed.run_dir)
    return [
        f"step {step}: {steps.get(step)} and not {wanted.get(step)}"
        for step in sorted(steps.keys() | wanted.keys())
        if not _are_same(steps.get(step, {}), wanted.get(step, {}))
    ]


def _are_same(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Tell whether metrics have the same bits, where NaN is what NaN is."""
    return one.keys() == other.keys() and all(
        one[key] == other[key] or (math.isnan(one[key]) and math.isnan(other[key])) for key in one
    )


def _replays(run_dir: Path) -> list[str]:
    contents = (line.content for line in LineFile(run_dir / METRICS_FILE).lines())
    return [f"step {each['step']}: {each['replay']}" for each in contents if each.get("replay")]


def _digests(spec: JobSpec, undisturbed: JobSpec) -> list[str]:
    digests = [_newest_digest(each.run_dir) for each in (spec, undisturbed)]
    return [] if digests[0] == digests[1] is not None else [f"{digests[0]} and not {digests[1]}"]


def _newest_digest(run_dir: Path) -> str | None:
    newest = CheckpointStore(run_dir, lambda damage: None).newest_verified()
    return None if newest is None else digest_of_checkpoint(newest)


def sample_problems(spec: JobSpec, steps: Sequence[int], dataset: Dataset) -> list[str]:
    """Count the samples that the steps of a run have taken, by its order and its roll-backs.

    Args:
        spec: The job.
        steps: Those that count, from 1.
        dataset: Which the samples are of.
    """
    missing = sorted(set(range(1, spec.num_steps + 1)) - set(steps))
    rolled = [e for e in Journal(spec.run_dir).read() if e["kind"] == ROLLED_BACK]
    order = BatchOrder((event["first_batch"], event["last_batch"]) for event in rolled)
    size, num_samples = spec.train.global_batch_size, dataset.info.num_train_sequences
    seen: Counter[tuple[int, int]] = Counter()
    for step in steps:
        places = order.batch_of(step - 1) * size + np.arange(size, dtype=np.int64)
        numbers = dataset.sample_numbers(places, spec.train.seed)
        seen.update(zip((places // num_samples).tolist(), numbers.tolist(), strict=True))
    twice = [f"sample {n} of epoch {epoch}: {k} times" for (epoch, n), k in seen.items() if k > 1]
    whole = spec.num_steps * size // num_samples if not rolled else 0
    absent = [
        f"sample {n} of epoch {epoch} is missing"
        for epoch in range(whole)
        for n in range(num_samples)
        if (epoch, n) not in seen
    ]
    return [f"step {step} is missing" for step in missing] + twice + absent


def _bad_checkpoints(run_dir: Path) -> list[str]:
    """Return what is wrong with checkpoints that the run has not named as damaged since."""
    named = [e for e in Journal(run_dir).read() if e["kind"] == "checkpoint_damaged"]
    problems = []
    for each in CheckpointStore(run_dir, lambda damage: None).list():
        is_named = any(
            str(each.path) in event["damage"] and event["time"] > each.manifest.created
            for event in named
        )
        problem = None if is_named else _problem_with(each)
        if problem is not None:
            problems.append(f"{each.path.name}: {problem}")
    return problems


def _problem_with(checkpoint: Checkpoint) -> str | None:
    try:
        dmuon.verify_files(checkpoint.path, checkpoint.manifest)
    except dmuon.DamagedCheckpointError as damage:
        return str(damage)
    names = nonfinite_in(checkpoint)
    return f"{names[0]} is not finite" if names else None
