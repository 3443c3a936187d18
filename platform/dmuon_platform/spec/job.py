"""A whole job: one frozen value that decides everything a run computes."""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from dmuon_platform.spec.batch import accumulation, problem_with_batch
from dmuon_platform.spec.checkpoint import CheckpointSpec
from dmuon_platform.spec.data import DataSpec
from dmuon_platform.spec.evaluation import EvaluationSpec
from dmuon_platform.spec.export import ExportSpec
from dmuon_platform.spec.faults import FaultsSpec
from dmuon_platform.spec.mesh import MeshSpec
from dmuon_platform.spec.model import ModelSpec
from dmuon_platform.spec.optimizer import OptimizerSpec
from dmuon_platform.spec.problem import Problem
from dmuon_platform.spec.resources import ResourcesSpec
from dmuon_platform.spec.resume import differences, differences_that_forbid_resume
from dmuon_platform.spec.schedule import ScheduleSpec
from dmuon_platform.spec.section import Section
from dmuon_platform.spec.toml import to_toml
from dmuon_platform.spec.tracking import TrackingSpec
from dmuon_platform.spec.train import TrainSpec
from dmuon_platform.spec.user_path import user_path

BYTE_VOCABULARY = 256
"""All bytes; one that UTF-8 never uses separates documents."""

TOKENIZER_FILE = "tokenizer.json"
"""In the folder of a Hugging Face model."""

RESERVED_NAMES = frozenset({"data", "mlartifacts", "mlflow.db", "mlruns"})
"""What else lies in ``storage``."""

RULES_BROKEN = "dmuon_rules"
"""Type of the pydantic error that carries our own problems."""


class JobSpec(Section):
    """A job file, read and checked. The run lives in ``<storage>/<name>``."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100, examples=["my_first_run"]
    )
    """Identity of the run under ``storage``: launched again, it goes on where it stopped."""

    storage: str = Field("runs", min_length=1)
    """Folder of all runs; on several machines one that all of them can write."""

    model: ModelSpec = ModelSpec()
    data: DataSpec
    mesh: MeshSpec = MeshSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    train: TrainSpec
    evaluation: EvaluationSpec = EvaluationSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    resources: ResourcesSpec = ResourcesSpec()
    faults: FaultsSpec = FaultsSpec()
    tracking: TrackingSpec = TrackingSpec()
    export: ExportSpec = ExportSpec()

    @model_validator(mode="before")
    @classmethod
    def _tokenizer_is_that_of_the_model(cls, given: Any) -> Any:
        """A model that was trained knows the tokens of the file in its folder."""
        match given:
            case {"model": {"path": str(path)}, "data": dict(data)} if "tokenizer" not in data:
                file = user_path(path) / TOKENIZER_FILE
                if path and file.is_file():
                    return {**given, "data": {**data, "tokenizer": str(file)}}
        return given

    @field_validator("name")
    @classmethod
    def _name_is_free(cls, name: str) -> str:
        if name in RESERVED_NAMES:
            taken = ", ".join(sorted(RESERVED_NAMES))
            raise PydanticCustomError("reserved", "must not be one of {taken}", {"taken": taken})
        return name

    @field_validator("storage")
    @classmethod
    def _storage_is_a_folder(cls, storage: str) -> str:
        if "\0" in storage:
            raise PydanticCustomError("null", "must be a folder, whose name has no NUL character")
        if re.match("[A-Za-z][A-Za-z0-9+.-]+:/", storage):  # pathlib makes one slash of two
            raise PydanticCustomError(
                "url",
                "must be a folder, not a URL: mount that storage on all machines, or copy "
                "checkpoints to it with: dmuon checkpoint copy",
            )
        if str(user_path(storage)).startswith("~"):
            raise PydanticCustomError(
                "user", "must be a folder, and no user here has that name: write it from / on"
            )
        return storage

    @model_validator(mode="after")
    def _keeps_all_rules(self) -> Self:
        problems = list(self.problems())
        if problems:
            text = "\n".join(map(str, problems))
            context = {"text": text, "problems": problems}
            raise PydanticCustomError(RULES_BROKEN, "{text}", context)
        return self

    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong within and between sections, every field being right."""
        sections = [value for _, value in self if isinstance(value, Section)]
        within = [problem for section in sections for problem in section.problems()]
        yield from within
        yield from self._problems_with_best()
        if any(problem.key.startswith(("resources.", "mesh.", "train.")) for problem in within):
            return
        yield from self._problems_with_workers()
        yield from self._problems_with_schedule()
        yield from self._problems_with_injected()
        too_few = self.model.vocab_size < BYTE_VOCABULARY and self.model.path is None
        if self.data.tokenizer == "bytes" and too_few:
            yield Problem(
                "model.vocab_size",
                f"{self.model.vocab_size} is too few for byte tokens",
                f"write vocab_size = {BYTE_VOCABULARY} or more",
                reads=("data.tokenizer", "model.path"),
            )

    def _problems_with_best(self) -> Iterator[Problem]:
        between, every = self.evaluation.every, self.checkpoint.every
        if self.checkpoint.keep_best and (between is None or every % between):
            found = "there is none" if between is None else f"they are {between} steps apart"
            yield Problem(
                "checkpoint.keep_best",
                f"the best are told by an evaluation at each checkpoint, every {every} steps, and "
                f"{found}",
                f"write evaluation.every = {every}, say",
                reads=("checkpoint.every", "evaluation.every"),
            )

    def _problems_with_workers(self) -> Iterator[Problem]:
        # Numbers in between that do not fit are passed over when workers come and go.
        ends = sorted(set(self.resources.bounds))
        misfits = [misfit for n in ends if (misfit := self.mesh.problem_with(n))]
        yield from misfits[:1]
        problem = problem_with_batch(self.train, ends)
        if problem is not None:
            yield problem

    def _problems_with_schedule(self) -> Iterator[Problem]:
        warmup, decay = self.schedule.warmup_steps, self.schedule.decay_steps or 0
        if warmup + decay > self.num_steps:
            parts = f"{warmup} + {decay} steps of decay are" if decay else f"{warmup} is"
            yield Problem(
                "schedule.warmup_steps",
                f"{parts} longer than the whole run of {self.num_steps} steps",
                f"write at most {max(0, self.num_steps - decay)}",
                ("schedule.decay_steps", "train.steps", "train.tokens", "data.sequence_length"),
            )

    def _problems_with_injected(self) -> Iterator[Problem]:
        _, most = self.resources.bounds
        for fault in self.faults.inject:
            if fault.step > self.num_steps:
                yield Problem(
                    "faults.inject.step",
                    f"{fault.step} is beyond the whole run of {self.num_steps} steps",
                    f"write at most {self.num_steps}",
                    ("train.steps", "train.tokens"),
                )
            if isinstance(fault.rank, int) and fault.rank >= most:
                yield Problem(
                    "faults.inject.rank",
                    f"{fault.rank} is no rank of at most {most} workers, which count from 0",
                    f"write at most {most - 1}",
                    ("resources.workers",),
                )

    @property
    def tokens_per_step(self) -> int:
        """Predicted tokens of one optimizer step."""
        return self.train.global_batch_size * self.data.sequence_length

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.train.steps is not None:
            return self.train.steps
        return math.ceil((self.train.tokens or 0) / self.tokens_per_step)

    @property
    def fitting_workers(self) -> list[int]:
        """Every number of workers that the run may have: it fits the mesh and the batch."""
        return [
            n
            for n in self.resources.possible_workers
            if self.mesh.problem_with(n) is None and problem_with_batch(self.train, [n]) is None
        ]

    @property
    def run_dir(self) -> Path:
        """The folder of this run, absolute as seen from the current folder."""
        return user_path(self.storage).absolute() / self.name

    def resolve_mesh(self, num_workers: int) -> tuple[int, int]:
        """Return ``(replicate, shard)``.

        Raises:
            SpecError: The mesh does not fit that many workers.
        """
        return self.mesh.resolve(num_workers)

    def accumulation(self, num_workers: int) -> int:
        """Return how many micro-batches each worker does in one step.

        Raises:
            SpecError: The global batch does not divide.
        """
        return accumulation(self.train, num_workers)

    def anchored(self, folder: Path) -> "JobSpec":
        """Return this job with an absolute ``storage``; a relative one starts at ``folder``."""
        storage = str((folder / user_path(self.storage)).absolute())
        return self.model_copy(update={"storage": storage})

    def digest(self) -> str:
        """Return the SHA-256 of everything but ``storage``, which may be called by other paths."""
        plain = self.model_dump(mode="json", exclude={"storage"})
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()

    def to_toml(self) -> str:
        """Return the whole job, defaults included, as a job file."""
        return to_toml(self.model_dump(mode="json"))

    def differences_that_forbid_resume(self, earlier: "JobSpec") -> list[str]:
        """Return what makes this another run than ``earlier``, as ``key: old -> new``."""
        return differences_that_forbid_resume(earlier, self)

    def differences(self, earlier: "JobSpec") -> list[str]:
        """Return what has changed since ``earlier``, as ``key: old -> new``."""
        return differences(earlier, self)
