"""One attempt after another at a training, each a Ray Train run of its own."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

from dmuon_platform.errors import GracefulStop
from dmuon_platform.pulse import catch_sigterm
from dmuon_platform.saving import RAY_FOLDER
from dmuon_platform.spec import JobSpec
from dmuon_platform.store import CheckpointStore
from dmuon_platform.supervisor import Cause, cause_of
from dmuon_platform.worker import train_worker

REFRESH_S = 0.5
"""Seconds between two looks at a training in motion."""

START_FAILURES = 3
"""How often Ray may fail to start the workers before that counts as a failed attempt."""

SNAPSHOT = "checkpoint_manager_snapshot.json"


class Attempts:
    """Starts attempts with rising numbers and watches each from the driver's main thread."""

    def __init__(
        self,
        spec: JobSpec,
        dataset: Path,
        facts: dict[str, Any],
        launch: str,
        watch: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._config = {
            "spec": spec.model_dump(mode="json"),
            "dataset": str(dataset),
            "facts": facts,
            "launch": launch,
        }
        self._watch = watch
        self._number = 0

    def run(self) -> tuple[int, dict[str, Any] | Cause]:
        """Do one attempt; return its number, and its result or the cause of its end."""
        try:
            attempt = CheckpointStore(self._spec.run_dir).acquire_attempt()
            set_damaged_snapshot_aside(self._spec.run_dir)
        except OSError as error:  # a full disk: what failed before is what the user should read
            self._number += 1
            text = f"No attempt could begin, since {self._spec.run_dir} cannot be written: {error}"
            return self._number, Cause(text, "", died=True)
        self._number = attempt
        trainer = _trainer(self._spec, {**self._config, "attempt": attempt})
        outcome: list[dict[str, Any] | Cause] = []

        def fit() -> None:
            try:
                outcome.append(_outcome_of(trainer.fit().return_value))
            except Exception as error:  # the supervisor sorts them
                outcome.append(cause_of(error))

        # In a thread: Ray then leaves Ctrl-C alone, and this one can draw.
        thread = threading.Thread(target=fit, name=f"attempt-{attempt}", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(REFRESH_S)
            self._watch()
        return attempt, outcome[0]


def _outcome_of(result: dict[str, Any]) -> dict[str, Any] | Cause:
    stopped = result.get("stopped")
    if stopped is None:
        return result
    text = f"Stopped after step {stopped['step']}: {stopped['reason']}. Run it again to go on."
    return Cause(text, "", final=GracefulStop(text))


class _Backend(TorchConfig().backend_cls):  # type: ignore[misc]
    """Ray's torch backend, whose workers take SIGTERM for a request to stop."""

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        super().on_training_start(worker_group, backend_config)
        worker_group.execute(catch_sigterm)  # in their main threads, where signals arrive


class _TorchConfig(TorchConfig):  # type: ignore[misc]
    @property
    def backend_cls(self) -> type:
        return _Backend


def _trainer(spec: JobSpec, config: dict[str, Any]) -> TorchTrainer:
    fewest, most = spec.resources.bounds
    resources = {"CPU": spec.resources.cpus_per_worker}
    if spec.resources.gpus_per_worker:
        resources["GPU"] = spec.resources.gpus_per_worker
    return TorchTrainer(
        train_worker,
        train_loop_config=config,
        torch_config=_TorchConfig(timeout_s=spec.faults.timeout_s),
        scaling_config=ray.train.ScalingConfig(
            num_workers=most if fewest == most else (fewest, most),
            use_gpu=spec.resources.gpus_per_worker > 0,
            resources_per_worker=resources,
        ),
        run_config=ray.train.RunConfig(
            name=RAY_FOLDER,
            storage_path=str(spec.run_dir),
            # Ray would retry plain bugs too; `supervisor` decides instead.
            failure_config=ray.train.FailureConfig(
                max_failures=0, controller_failure_limit=START_FAILURES
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
    except (ValueError, KeyError, TypeError):
        folders = None
    if folders is None or not all(folder.is_dir() for folder in folders):
        number = len(list(snapshot.parent.glob(f"{SNAPSHOT}.damaged-*")))
        snapshot.rename(snapshot.with_name(f"{SNAPSHOT}.damaged-{number}"))
