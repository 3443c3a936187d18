"""What a registered model was made from, as tags: data, job, code, checkpoint, weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dmuon_platform.catalogue import CHECKPOINTS_FOLDER
from dmuon_platform.export import Export


def lineage_of(
    run_dir: Path, export: Export, facts: Mapping[str, Any], events: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Return where a model comes from; what is not known is left out.

    Args:
        run_dir: The folder of the run, absolute.
        export: The model.
        facts: Of the launch: ``git``, ``dataset``, ``spec_digest``.
        events: The journal of the run.
    """
    trained = [event for event in events if event.get("kind") == "trained"]
    weights = [each.get("weights_sha256") for each in trained if each.get("step") == export.step]
    checkpoint = export.checkpoint
    tags = {
        "dataset.digest": facts.get("dataset", {}).get("digest"),
        "spec_digest": facts.get("spec_digest"),
        "git.commit": facts.get("git", {}).get("commit"),
        "git.dirty": facts.get("git", {}).get("dirty"),
        "checkpoint.uri": checkpoint and (run_dir / CHECKPOINTS_FOLDER / checkpoint).as_uri(),
        "checkpoint.manifest_sha256": export.manifest_sha256,
        "weights_sha256": weights[-1] if weights else None,
    }
    return {key: str(value) for key, value in tags.items() if value is not None}
