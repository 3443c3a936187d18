"""The weights in a local Hugging Face folder, looked at before anything is built of them."""

import json
import zipfile
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open

from dmuon_platform.errors import SpecError

SOUGHT = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""What ``transformers`` looks for: the first that is there is all it reads, or names all of it."""


def has_weights(folder: Path) -> bool:
    """Say whether the folder holds weights that ``transformers`` opens."""
    return _found(folder) is not None


def check_weights(folder: Path) -> None:
    """Refuse a folder whose weights are not all there, by names, headers and pickles alone.

    Raises:
        SpecError: There are none, files that an index names are missing, or one is cut, or holds
            more than tensors.
    """
    files = _files(folder)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise SpecError(
            f"model.path: {folder} lacks the weights {', '.join(missing[:4])}"
            f"{f' and {len(missing) - 4} more' if missing[4:] else ''}, which the index beside "
            "them names. Copy or download the missing files too."
        )
    if not files:
        raise SpecError(
            f"model.path: {folder} has a config.json but no weights (model.safetensors or "
            "pytorch_model.bin, whole or in shards with their index), so it would be trained from "
            "random values. Put the weights there; to train from scratch, remove model.path and "
            "give the sizes."
        )
    for file in files:
        if file.suffix == ".safetensors":
            _check_header(file)
        else:
            _check_pickled(file)


def _found(folder: Path) -> Path | None:
    return next((file for name in SOUGHT if (file := folder / name).is_file()), None)


def _files(folder: Path) -> list[Path]:
    """Return the files with weights, of which an index may name some that are missing."""
    found = _found(folder)
    if found is None or found.suffix != ".json":
        return [] if found is None else [found]
    try:
        names = set(json.loads(found.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(folder / name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecError(
            f"model.path: {found} cannot be read as an index of weights ({error}). Copy or "
            "download it again."
        ) from error


def _check_header(file: Path) -> None:
    try:
        with safe_open(file, "pt"):  # compares the header with the length of the file
            pass
    except (OSError, SafetensorError) as error:
        raise _damaged(file, str(error)) from error


def _check_pickled(file: Path) -> None:
    is_archive = zipfile.is_zipfile(file)
    try:  # maps the file; one of before torch 1.6 is read, and tells that way where it is cut
        weights = torch.load(file, map_location="meta", weights_only=True, mmap=is_archive)
    except Exception as error:  # torch raises many kinds, for damage and for what is refused
        is_whole = isinstance(error, UnpicklingError) and (is_archive or "global" in str(error))
        if is_whole:
            raise _no_tensors(file) from error
        raise _damaged(file, "torch.load cannot read them") from error
    if not isinstance(weights, dict) or not all(map(torch.is_tensor, weights.values())):
        raise _no_tensors(file)


def _no_tensors(file: Path) -> SpecError:
    return SpecError(
        f"model.path: {file} holds other things than a dict of tensors, and code in it is never "
        "run. Load it where you trust it and write model.state_dict() with torch.save, or with "
        "safetensors to model.safetensors."
    )


def _damaged(file: Path, why: str) -> SpecError:
    return SpecError(
        f"model.path: the weights {file} are cut or damaged ({why}). Copy or download the file "
        "again; one that Git LFS keeps comes with `git lfs pull`."
    )
