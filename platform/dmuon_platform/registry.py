"""The exported model in the MLflow registry: one version for one export, asked once or often."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LoggedModel
from mlflow.exceptions import MlflowException

from dmuon_platform.export import Export
from dmuon_platform.model_signature import describe_model
from dmuon_platform.tracked_run import TrackedRun

DIGEST_TAG = "dmuon.export_sha256"
MODEL_FILE = "MLmodel"
"""Where MLflow looks for what a model is, its signature among it."""
BUILT_IN_ALIAS = "latest"
"""MLflow knows it by itself, as ``models:/NAME/latest``, and refuses to set it."""
VERSIONS_TAG = "mlflow.modelVersions"
"""By which MLflow's pages lead from a logged model to its versions."""


def register(
    run: TrackedRun, export: Export, name: str, alias: str | None, lineage: Mapping[str, str]
) -> dict[str, str]:
    """Upload an export as a logged model of the run and give it a version and an alias.

    May be repeated after any interruption: what is there already, found by the export's digest,
    is used.

    Args:
        run: Whose model it is.
        export: The model.
        name: Under which it is registered.
        alias: Of the new version; None for none.
        lineage: What it was made from: tags of the model and of the version.

    Returns:
        ``digest``, ``model_id``, ``name`` and ``version``.
    """
    tags = {**lineage, DIGEST_TAG: export.digest}
    model = _logged_model(run, export, name, tags)
    version = _version(run, model, name, {**tags, "step": str(export.step)})
    if alias is not None and alias.lower() != BUILT_IN_ALIAS:
        run.client.set_registered_model_alias(name, alias, version)
    return {
        "digest": export.digest,
        "model_id": model.model_id,
        "name": name,
        "version": str(version),
    }


def _logged_model(run: TrackedRun, export: Export, name: str, tags: dict[str, str]) -> LoggedModel:
    client = run.client
    query = f"tags.`{DIGEST_TAG}` = '{export.digest}'"
    found = client.search_logged_models([run.experiment_id], query)
    mine = [model for model in found if model.source_run_id == run.run_id]
    ready = [model for model in mine if str(model.status) == "READY"]
    if ready:
        return ready[0]
    model = mine[0] if mine else None
    if model is None:
        model = client.create_logged_model(
            run.experiment_id,
            name=f"{name}-step{export.step}".replace("/", "-"),
            source_run_id=run.run_id,
            tags=tags,
            params={"step": str(export.step)},
            model_type="transformers-causal-lm",
        )
    client.log_model_artifacts(model.model_id, str(export.folder))
    with tempfile.TemporaryDirectory() as scratch:
        description = describe_model(export, run.run_id, model.model_id, tags)
        (Path(scratch) / MODEL_FILE).write_text(description, encoding="utf-8")
        client.log_model_artifacts(model.model_id, scratch)
    return client.finalize_logged_model(model.model_id, "READY")


def _version(run: TrackedRun, model: LoggedModel, name: str, tags: dict[str, str]) -> Any:
    client: MlflowClient = run.client
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    for version in client.search_model_versions(f"name = '{name}'"):
        same = version.tags.get(DIGEST_TAG) == tags[DIGEST_TAG]
        if same and version.run_id == run.run_id:
            return version.version
    version = client.create_model_version(
        name,
        source=f"models:/{model.model_id}",
        run_id=run.run_id,
        model_id=model.model_id,
        tags=tags,
    )
    link = json.dumps([{"name": name, "version": version.version}])
    client.set_logged_model_tags(model.model_id, {VERSIONS_TAG: link})
    return version.version
