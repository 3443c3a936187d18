"""The weights in a local Hugging Face folder, looked at before anything is built of them."""

import json
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dmuon_platform.errors import SpecError

SINGLE = "model.safetensors"
INDICES = (f"{SINGLE}.index.json", "pytorch_model.bin.index.json")
"""Each names the files that a model's tensors are divided over."""


def has_weights(folder: Path) -> bool:
    """Say whether the folder holds a file of weights that ``transformers`` opens."""
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin"))


def check_weights(folder: Path) -> None:
    """Refuse a folder whose weights are not all there, by names, headers and pickles alone.

    Raises:
        SpecError: There are none, files that an index names are missing, or one is cut.
    """
    missing = [name for index in INDICES for name in _missing(folder, folder / index)]
    if missing:
        raise SpecError(
            f"model.path: {folder} lacks the weights {', '.join(missing[:4])}"
            f"{f' and {len(missing) - 4} more' if missing[4:] else ''}, which the index beside "
            "them names. Copy or download the missing files too."
        )
    if not has_weights(folder):
        raise SpecError(
            f"model.path: {folder} has a config.json but no weights (model.safetensors or "
            "pytorch_model.bin, whole or in shards), so it would be trained from random values. "
            "Put the weights there; to train from scratch, remove model.path and give the sizes."
        )
    for file in sorted(folder.glob("*.safetensors")):
        _check_header(file)
    if not any((folder / name).is_file() for name in (SINGLE, INDICES[0])):  # else those are read
        for file in sorted(folder.glob("pytorch_model*.bin")):
            _check_pickled(file)


def _missing(folder: Path, index: Path) -> list[str]:
    if not index.is_file() or (folder / index.name.removesuffix(".index.json")).is_file():
        return []  # a single file with all tensors comes first
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(name for name in names if not (folder / name).is_file())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecError(
            f"model.path: {index} cannot be read as an index of weights ({error}). Copy or "
            "download it again."
        ) from error


def _check_header(file: Path) -> None:
    try:
        with safe_open(file, "pt"):  # compares the header with the length of the file
            pass
    except (OSError, SafetensorError) as error:
        raise _damaged(file, str(error)) from error


def _check_pickled(file: Path) -> None:
    try:  # maps the file; one of before torch 1.6 is read, and tells that way where it is cut
        is_archive = zipfile.is_zipfile(file)
        torch.load(file, map_location="meta", weights_only=True, mmap=is_archive)
    except Exception as error:  # torch raises many kinds, for damage and for what is refused
        why = "torch.load with weights_only=True refuses them"
        raise _damaged(file, why) from error


def _damaged(file: Path, why: str) -> SpecError:
    return SpecError(
        f"model.path: the weights {file} are cut or damaged ({why}). Copy or download the file "
        "again; one that Git LFS keeps comes with `git lfs pull`."
    )
