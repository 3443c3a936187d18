"""Small checkpoints for tests, and manifests that say what no writer would."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmuon.checkpoint.durable_file import write_file
from dmuon.checkpoint.facts import facts_of
from dmuon.checkpoint.manifest import (
    MANIFEST_FILE,
    FileFacts,
    Manifest,
    OptimizerFacts,
    write_manifest,
)
from dmuon.checkpoint.tensor_file import write_tensors

MODEL_FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
OPTIM_FILE = "optim-00001-of-00001.safetensors"


def write(path: Path, tensors: Mapping[str, Tensor]) -> FileFacts:
    facts = {name: facts_of(tensor) for name, tensor in tensors.items()}
    return write_tensors(path, facts, tensors.__getitem__)


def tensors_by_file() -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return {
        MODEL_FILES[0]: {
            "embed.weight": torch.randn(7, 4, generator=generator),
            "up.weight": torch.randn(5, 4, generator=generator).bfloat16(),
        },
        MODEL_FILES[1]: {"down.weight": torch.randn(7, 4, generator=generator)},
        OPTIM_FILE: {"momentum_buffer/up.weight": torch.randn(5, 4, generator=generator)},
    }


def write_checkpoint(folder: Path) -> Manifest:
    """Of two model files of one size, an optimizer's, a config and a tied weight."""
    folder.mkdir()
    tensors = tensors_by_file()
    files = {name: write(folder / name, content) for name, content in tensors.items()}
    files["config.json"] = write_file(folder / "config.json", b"{}")
    manifest = Manifest(
        step=1000,
        files=files,
        tensors={
            file: {name: facts_of(tensor) for name, tensor in content.items()}
            for file, content in tensors.items()
        },
        mesh={"replicate": 1, "shard": 2},
        tied={"head.weight": "embed.weight"},
        optimizer=OptimizerFacts([{"lr": 0.1, "betas": (0.9, 0.95)}], 1000, {"norm.weight": 3.0}),
        extra={"loss": 1.5},
        versions={"torch": torch.__version__},
        created=1.5,
    )
    write_manifest(folder, manifest)
    return manifest


def signed(rest: str) -> str:
    """The text of a manifest with a right checksum: ``rest`` is all after its first two lines."""
    return f'{{\n "sha256": "{hashlib.sha256(rest.encode()).hexdigest()}",\n{rest}'


def rest_of(text: str) -> str:
    return text.split("\n", 2)[2]


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the content of a manifest and make its checksum right again."""
    path = folder / MANIFEST_FILE
    content = json.loads("{" + rest_of(path.read_text()))
    change(content)
    path.write_text(signed(json.dumps(content, indent=1).removeprefix("{\n") + "\n"))


def raw_safetensors(header: bytes, values: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + values
