"""One MLflow run: found again or created, and told about in ways that may be repeated."""

import fcntl
import json
import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import mlflow
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from dmuon_platform.account import user_name
from dmuon_platform.credentials import with_credentials
from dmuon_platform.spec.uri import without_credentials
from dmuon_platform.tracking_files import Description

RUN_KEY_TAG = "dmuon.run_key"
MAX_TAG_CHARACTERS = 4000
MAX_PARAM_CHARACTERS = 6000
MAX_TAGS = 100
"""In one request; also of params."""
MAX_METRICS = 1000
"""In one request."""
MAX_DIGEST_CHARACTERS = 36
"""Of a dataset."""
ANSWER_S = 3.0
"""A server that needs longer for its front page is taken for dead, for now."""
SQLITE = "sqlite:///"


class TrackedRun:
    """The run of one run folder on one MLflow server or database.

    Everything here may be called again after a failure: it sets, and adds nothing twice. The
    exception is `log_metrics`, whose caller asks `steps_of` what is there already.
    """

    def __init__(self, description: Description) -> None:
        self._description = description
        mlflow.set_tracking_uri(with_credentials(description.uri))
        with _schema_lock(description.uri):
            self.client = mlflow.MlflowClient()
            self.experiment_id = self._find_experiment()
            self.run_id = self._find_run()

    def describe(self) -> None:
        """Tell what the run is: params once, tags, the job, the dataset."""
        told = self.client.get_run(self.run_id).data.params
        params = self._description.params
        new = [Param(k, v[:MAX_PARAM_CHARACTERS]) for k, v in params.items() if k not in told]
        for start in range(0, len(new), MAX_TAGS):
            self.client.log_batch(self.run_id, params=new[start : start + MAX_TAGS])
        changed = {  # params can be told once; what a later launch may change is a tag
            f"changed.{key}": params[key]
            for key, value in told.items()
            if key in params and params[key][:MAX_PARAM_CHARACTERS] != value
        }
        self.set_tags({**_tags(self._description), **changed})
        self.client.log_text(self.run_id, self._description.job_toml, "job.toml")
        self.client.log_dict(self.run_id, self._description.facts, "facts.json")
        if dataset := self._description.facts.get("dataset"):
            self.client.log_inputs(self.run_id, [_dataset_input(dataset)])

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Set tags, cut to what MLflow takes."""
        every = [RunTag(key, str(value)[:MAX_TAG_CHARACTERS]) for key, value in tags.items()]
        for start in range(0, len(every), MAX_TAGS):
            self.client.log_batch(self.run_id, tags=every[start : start + MAX_TAGS])

    def log_metrics(self, metrics: list[Metric]) -> None:
        """Add points to the curves."""
        for start in range(0, len(metrics), MAX_METRICS):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + MAX_METRICS])

    def steps_of(self, key: str) -> set[int]:
        """Return the steps at which a curve has points."""
        return {point.step for point in self.client.get_metric_history(self.run_id, key)}

    def log_json(self, content: Mapping[str, Any], path: str) -> None:
        """Keep plain data as an artifact."""
        self.client.log_dict(self.run_id, dict(content), path)

    def log_folder(self, folder: Path, path: str) -> None:
        """Keep everything in a folder as artifacts."""
        self.client.log_artifacts(self.run_id, str(folder), path)

    def log_file(self, file: Path, path: str) -> None:
        """Keep a file as an artifact.

        Raises:
            FileNotFoundError: There is no such file.
        """
        file.stat()
        self.client.log_artifact(self.run_id, str(file), path)

    def set_status(self, status: str, end_time_ms: int | None) -> None:
        """Show the run as running, finished, failed or killed."""
        if status == "RUNNING":
            self.client.update_run(self.run_id, status="RUNNING")
        else:
            self.client.set_terminated(self.run_id, status=status, end_time=end_time_ms)

    def _find_experiment(self) -> str:
        name = self._description.experiment
        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        folder = self._description.artifact_folder
        location = None if folder is None else Path(folder).as_uri()
        try:
            return self.client.create_experiment(name, artifact_location=location)
        except MlflowException:
            found = self.client.get_experiment_by_name(name)  # another job was faster
            if found is None:
                raise
            return found.experiment_id

    def _find_run(self) -> str:
        key = self._description.run_key
        query = f"tags.`{RUN_KEY_TAG}` = '{key}'"
        runs = self.client.search_runs([self.experiment_id], query, max_results=1)
        if runs:
            return runs[0].info.run_id
        name = self._description.run_name
        tags = {RUN_KEY_TAG: key, "mlflow.user": user_name() or str(os.getuid())}
        return self.client.create_run(self.experiment_id, tags=tags, run_name=name).info.run_id


def is_refused(error: Exception) -> bool:
    """Tell whether a server answers nobody who does not say who he is, or not this one."""
    return isinstance(error, MlflowException) and error.get_http_status_code() in (401, 403)


def is_reachable(uri: str) -> bool:
    """Ask a server for anything at all; databases count as reachable."""
    if not uri.startswith(("http://", "https://")):
        return True
    try:
        # urllib would take user and password for a part of the host's name
        urlopen(without_credentials(uri), timeout=ANSWER_S).close()
    except HTTPError:
        return True  # an answer
    except (OSError, UnicodeError) as error:  # whom to trust is MLflow's to decide
        return isinstance(getattr(error, "reason", None), ssl.SSLError)
    return True


def _tags(description: Description) -> dict[str, Any]:
    tags = dict(_flat(description.facts))
    git = description.facts.get("git", {})
    for fact, tag in {
        "commit": "mlflow.source.git.commit",
        "branch": "mlflow.source.git.branch",
    }.items():
        if fact in git:
            tags[tag] = git[fact]
    return {**tags, "mlflow.source.type": "JOB", "mlflow.source.name": "dmuon"}


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _dataset_input(facts: Mapping[str, Any]) -> DatasetInput:
    source = json.dumps({"uri": str(facts.get("folder", ""))})
    dataset = Dataset(
        name=str(facts.get("name", "dataset")),
        digest=str(facts.get("digest", ""))[:MAX_DIGEST_CHARACTERS],
        source_type="local",
        source=source,
        profile=json.dumps({k: v for k, v in facts.items() if isinstance(v, (int, float))}),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "train")])


@contextmanager
def _schema_lock(uri: str) -> Iterator[None]:
    """Let one process at a time open a SQLite store: the first one creates its tables."""
    if not uri.startswith(SQLITE):
        yield
        return
    path = Path(uri.removeprefix(SQLITE))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
