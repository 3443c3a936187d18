"""One attempt at a training: a Ray Train run of its own, with a fixed number of workers.

The process that is connected to Ray and Ray's controller import this file as well as the workers,
one after another before the first step, so it imports no more than those two need.
"""

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

from dmuon_platform import cluster
from dmuon_platform.causes import Cause, cause_of
from dmuon_platform.heartbeat import Heartbeats
from dmuon_platform.pulse import beat_period_s, catch_sigterm
from dmuon_platform.run_folder import RAY_FOLDER
from dmuon_platform.spec import JobSpec

START_FAILURES = 3
"""How often Ray may fail to start the workers before that counts as a failed attempt."""

SNAPSHOT = "checkpoint_manager_snapshot.json"


class Attempt:
    """One attempt in motion. Only in the process that is connected to Ray.

    Attributes:
        outcome: What the training returned, or why it ended; None while it runs.
    """

    def __init__(self, spec: JobSpec, num_workers: int, config: dict[str, Any]) -> None:
        self.outcome: dict[str, Any] | Cause | None = None
        # In a thread: Ray then leaves signals alone, and the driver can be answered.
        arguments = (spec, num_workers, config)
        threading.Thread(target=self._fit, args=arguments, name="fit", daemon=True).start()

    def _fit(self, spec: JobSpec, num_workers: int, config: dict[str, Any]) -> None:
        try:
            set_damaged_snapshot_aside(spec.run_dir)
            self.outcome = _trainer(spec, num_workers, config).fit().return_value
        except Exception as error:  # the supervisor sorts them
            self.outcome = cause_of(error)


class _Backend(TorchConfig().backend_cls):  # type: ignore[misc]
    """Ray's torch backend; its methods run in Ray's controller.

    Its workers take SIGTERM for a request to stop, and the controller beats, since Ray itself
    would wait for ever for one that is frozen.
    """

    def on_training_start(self, worker_group: Any, backend_config: "_TorchConfig") -> None:
        super().on_training_start(worker_group, backend_config)
        worker_group.execute(catch_sigterm)  # in their main threads, where signals arrive
        beats = Heartbeats(backend_config.run_dir)
        beats.beat_for_controller(backend_config.attempt, backend_config.beat_s)


@dataclass
class _TorchConfig(TorchConfig):  # type: ignore[misc]
    run_dir: Path = Path()
    attempt: int = 0
    beat_s: float = 0.0

    @property
    def backend_cls(self) -> type:
        return _Backend


class _Trainer(TorchTrainer):  # type: ignore[misc]
    """Ray's, with fewer processes of its own beside the workers, and so a sooner first step."""

    needless = frozenset({"DatasetsCallback"})
    """Of what Ray calls at each start: that one serves Ray datasets, and workers read their own."""

    def _create_default_callbacks(self) -> list[Any]:
        # They have no switch. Should Ray name them otherwise, their processes start, unused.
        callbacks = super()._create_default_callbacks()
        return [each for each in callbacks if type(each).__name__ not in self.needless]


class _OwnRayTrainer(_Trainer):
    """In a Ray of our own, which ends with its controller, nothing is left to be cleaned up."""

    needless = _Trainer.needless | {"PlacementGroupCleanerCallback"}


def _train(config: dict[str, Any]) -> dict[str, Any]:
    from dmuon_platform.worker import train_worker  # which only workers import

    return train_worker(config)


def _trainer(spec: JobSpec, num_workers: int, config: dict[str, Any]) -> TorchTrainer:
    trainer = _OwnRayTrainer if cluster.address_of(spec) is None else _Trainer
    return trainer(
        _train,
        train_loop_config=config,
        torch_config=_TorchConfig(
            timeout_s=spec.faults.timeout_s,
            run_dir=spec.run_dir,
            attempt=config["attempt"],
            beat_s=beat_period_s(spec.faults),
        ),
        scaling_config=ray.train.ScalingConfig(
            num_workers=num_workers,
            use_gpu=spec.resources.gpus_per_worker > 0,
            resources_per_worker=spec.resources.of_one_worker,
        ),
        run_config=ray.train.RunConfig(
            name=RAY_FOLDER,
            storage_path=str(spec.run_dir),
            # Ray would retry plain bugs too; `supervisor` decides instead.
            failure_config=ray.train.FailureConfig(
                max_failures=0,
                max_preemption_failures=0,
                controller_failure_limit=START_FAILURES,
            ),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=spec.checkpoint.keep_last),
            logging_config=ray.train.LoggingConfig(log_level="ERROR"),
        ),
    )


def set_damaged_snapshot_aside(run_dir: Path) -> None:
    """Rename Ray's snapshot if Ray would refuse every later attempt because of it.

    It is overwritten in place, so a crash can cut it; and each folder it names must exist. We
    need nothing of it: the next report writes a new one.
    """
    snapshot = run_dir / RAY_FOLDER / SNAPSHOT
    try:
        results = json.loads(snapshot.read_text(encoding="utf-8"))["checkpoint_results"]
        folders = [snapshot.parent / result["checkpoint_dir_name"] for result in results]
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError, RecursionError):
        folders = None
    if folders is None or not all(folder.is_dir() for folder in folders):
        number = len(list(snapshot.parent.glob(f"{SNAPSHOT}.damaged-*")))
        snapshot.rename(snapshot.with_name(f"{SNAPSHOT}.damaged-{number}"))
