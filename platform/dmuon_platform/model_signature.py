"""What MLflow is told of an exported model: what goes in, what comes out, who can open it."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from mlflow.models import Model, ModelSignature
from mlflow.types import Schema, TensorSpec

from dmuon_platform.export import Export

FLAVOR = "huggingface_safetensors"
"""A folder that ``transformers`` opens; MLflow's own flavors would pickle or convert it."""

ANY = -1
"""A dimension that is as long as the caller likes, in MLflow's signatures."""


def describe_model(export: Export, run_id: str, model_id: str, metadata: Mapping[str, str]) -> str:
    """Return the ``MLmodel`` file of an export.

    Args:
        export: The model.
        run_id: The run that trained it.
        model_id: Of the logged model.
        metadata: Kept in the file, for those who download the model.
    """
    config = json.loads((export.folder / "config.json").read_text(encoding="utf-8"))
    model = Model(
        run_id=run_id,
        model_id=model_id,
        flavors={FLAVOR: {"loader": "transformers.AutoModelForCausalLM.from_pretrained"}},
        signature=_signature(config.get("vocab_size", ANY)),
        metadata=dict(metadata),
        model_size_bytes=_size(export.folder),
    )
    return str(model.to_yaml())


def _signature(vocab_size: int) -> ModelSignature:
    """Token ids (B, T) in, logits (B, T, V) out: what ``transformers`` calls them."""
    ids_BT = TensorSpec(np.dtype("int64"), (ANY, ANY), "input_ids")
    logits_BTV = TensorSpec(np.dtype("float32"), (ANY, ANY, vocab_size), "logits")
    return ModelSignature(inputs=Schema([ids_BT]), outputs=Schema([logits_BTV]))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
