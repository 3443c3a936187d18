"""The finished model as a Hugging Face folder, which ``transformers`` opens on its own."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmuon_platform.durable_file import sync, write_whole

if TYPE_CHECKING:
    import dmuon  # brings torch, which the drain, that imports this, has no use for

EXPORT_FOLDER = "export"
MODEL_FILES = ("model.safetensors", "model-")
"""How the names of the model's files begin."""
MANIFEST_FILE = "manifest.json"
"""Of a checkpoint."""
RECORD_FILE = "dmuon.json"
"""Written last: which checkpoint the folder was made from."""


@dataclass(frozen=True)
class Export:
    """A finished export."""

    folder: Path
    digest: str
    """Of the weights and all other files: equal for equal exports."""
    step: int
    checkpoint: str | None = None
    """Name of the folder of the checkpoint that it was made from."""
    manifest_sha256: str | None = None
    """Of that checkpoint's ``manifest.json``, which names the SHA-256 of every file of it."""


def export_model(
    run_dir: Path,
    checkpoint: Path,
    manifest: "dmuon.Manifest",
    config: Mapping[str, Any],
    files: Mapping[str, bytes],
) -> Export:
    """Write ``<run_dir>/export``: weights, configuration and tokenizer of one checkpoint.

    The folder changes as a whole; nothing happens when it holds the same export already.

    Args:
        run_dir: The folder of the run.
        checkpoint: The folder of a verified checkpoint.
        manifest: Its manifest.
        config: The model's ``config.json``.
        files: Further files by name, such as those of the tokenizer.
    """
    texts = {**config_files(config), **files}
    digest = _digest(manifest, texts)
    folder = run_dir / EXPORT_FOLDER
    found = read_export(run_dir)
    if found is not None and found.digest == digest:
        return found
    fresh = run_dir / f"{EXPORT_FOLDER}.writing"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for name in model_files(manifest):
        shutil.copyfile(checkpoint / name, fresh / name)
        sync(fresh / name)
    for name, data in texts.items():
        write_whole(fresh / name, data)
    manifest_sha256 = hashlib.sha256((checkpoint / MANIFEST_FILE).read_bytes()).hexdigest()
    origin = {
        "step": manifest.step,
        "digest": digest,
        "checkpoint": checkpoint.name,
        "manifest_sha256": manifest_sha256,
    }
    write_whole(fresh / RECORD_FILE, _json({**origin, "versions": dict(manifest.versions)}))
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    sync(run_dir)
    return Export(folder, digest, manifest.step, checkpoint.name, manifest_sha256)


def read_export(run_dir: Path) -> Export | None:
    """Return the run's finished export, None without one."""
    folder = run_dir / EXPORT_FOLDER
    try:
        record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
        return Export(
            folder,
            record["digest"],
            record["step"],
            record.get("checkpoint"),
            record.get("manifest_sha256"),
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def config_files(config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return what opens weights as this model: its configuration, and where a text ends.

    How to sample is the reader's choice.
    """
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation = {key: config[key] for key in ids if config.get(key) is not None}
    return {"config.json": _json(config), "generation_config.json": _json(generation)}


def model_files(manifest: "dmuon.Manifest") -> list[str]:
    """Weights in one file or in several with an index: what ``transformers`` opens."""
    return sorted(name for name in manifest.files if name.startswith(MODEL_FILES))


def _digest(manifest: "dmuon.Manifest", texts: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in model_files(manifest):
        digest.update(f"{name} {manifest.files[name].sha256}\n".encode())
    for name in sorted(texts):
        digest.update(f"\n{name} {len(texts[name])}\n".encode() + texts[name])
    return digest.hexdigest()


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
