"""The manifest that makes a folder a checkpoint: what is in it, and whether it is whole."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dmuon.checkpoint import fields
from dmuon.checkpoint.durable_file import write_file
from dmuon.checkpoint.facts import FileFacts, TensorFacts
from dmuon.checkpoint.file_names import check_plain, file_in, local_path
from dmuon.checkpoint.plain_json import decode, encode, parse
from dmuon.errors import CheckpointError, DamagedCheckpointError
from dmuon.layout import Split
from dmuon.splits import plain_splits, read_splits

__all__ = [
    "MANIFEST_FILE",
    "FileFacts",
    "Manifest",
    "OptimizerFacts",
    "TensorFacts",
    "read_manifest",
    "refuse_torch_checkpoint",
    "write_manifest",
]

MANIFEST_FILE = "manifest.json"
TORCH_METADATA_FILE = ".metadata"
"""It is in every folder that ``torch.distributed.checkpoint`` has written."""
FORMAT = "dmuon-checkpoint"
FORMAT_VERSION = 1
_MOST_BYTES = 64 * 2**20  # half a million tensors
_HEAD = '{\n "sha256": "%s",\n'
"""How every version begins: with the SHA-256 of the rest, so that no byte changes unnoticed."""


class _OtherFormatError(ValueError):
    """Written by a later version of this package, or by the platform before this format."""


@dataclass(frozen=True)
class OptimizerFacts:
    """The optimizer's state apart from its tensors.

    Attributes:
        param_groups: settings of each group, as plain data.
        num_steps: that the optimizer has done.
        steps: that each parameter has done, by its name.
        splits: parameters that were updated in parts, by name; None where that was not noted.
    """

    param_groups: list[dict[str, Any]]
    num_steps: int
    steps: Mapping[str, int | float]
    splits: Mapping[str, Split] | None = None


@dataclass(frozen=True)
class Manifest:
    """Everything a checkpoint says about itself, apart from its tensors' values.

    Attributes:
        step: optimizer steps done.
        files: by name; the manifest itself is not among them.
        tensors: by the name of their file and their own.
        mesh: sizes that it was written on; nothing depends on them.
        tied: weights stored once: the other name, and the name that is in a file.
        optimizer: None for weights alone.
        module_state: what ``get_extra_state`` of modules returned, as plain data, by name.
        extra: the caller's plain data.
        versions: of the packages that wrote it.
        created: seconds since the epoch.

    Raises:
        ValueError: the parts do not fit each other.
    """

    step: int
    files: Mapping[str, FileFacts]
    tensors: Mapping[str, Mapping[str, TensorFacts]]
    mesh: Mapping[str, int]
    tied: Mapping[str, str] = field(default_factory=dict)
    optimizer: OptimizerFacts | None = None
    module_state: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    created: float = 0.0

    def __post_init__(self) -> None:
        for name in self.files:
            check_plain(name)
            if name == MANIFEST_FILE:
                raise ValueError(f"{name} cannot be among its own files")
        self._check_tensors()

    def _check_tensors(self) -> None:
        seen: set[str] = set()
        for file, tensors in self.tensors.items():
            if file not in self.files:
                raise ValueError(f"the file {file!r:.100} of tensors is not among its files")
            if sum(facts.num_bytes for facts in tensors.values()) > self.files[file].size:
                raise ValueError(f"{file} is smaller than the tensors in it")
            if twice := seen & tensors.keys():
                raise ValueError(f"{min(twice)!r:.100} is in {file} and in another file")
            seen.update(tensors)
        for alias, kept in self.tied.items():
            if alias in seen or kept not in seen:
                raise ValueError(f"{alias!r:.100} cannot stand for {kept!r:.100}")

    def to_json(self) -> str:
        """The text of ``manifest.json``.

        Raises:
            TypeError: the caller's data, or the settings of a group, are not plain.
        """
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "created": self.created,
            "versions": dict(self.versions),
            "mesh": dict(self.mesh),
            "files": {name: _encode_file(facts) for name, facts in self.files.items()},
            "tensors": {
                file: {
                    name: {"dtype": facts.dtype, "shape": list(facts.shape)}
                    for name, facts in tensors.items()
                }
                for file, tensors in self.tensors.items()
            },
            "tied": dict(self.tied),
            "optimizer": _encode_optimizer(self.optimizer),
            "module_state": encode(self.module_state, "module_state"),
            "extra": encode(self.extra, "extra"),
        }
        rest = json.dumps(content, indent=1, allow_nan=False).removeprefix("{\n") + "\n"
        return _HEAD % hashlib.sha256(rest.encode()).hexdigest() + rest

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read the text of ``manifest.json``, which may be anybody's.

        Raises:
            ValueError: it is no manifest, has changed, or is of a newer format.
        """
        _check_head(text)
        content = fields.mapping(parse(text), "it")
        _check_format(content)
        tensors = fields.mapping_at(content, "tensors")
        return cls(
            step=fields.count_at(content, "step"),
            files={
                name: _decode_file(facts)
                for name, facts in fields.mappings_at(content, "files").items()
            },
            tensors={file: fields.tensors_at(tensors, file) for file in tensors},
            mesh=fields.counts_at(content, "mesh"),
            tied=fields.texts_at(content, "tied"),
            optimizer=_decode_optimizer(content.get("optimizer")),
            module_state=fields.mapping(decode(content.get("module_state", {})), "'module_state'"),
            extra=fields.mapping(decode(content.get("extra")), "'extra'"),
            versions=fields.texts_at(content, "versions"),
            created=fields.number_at(content, "created"),
        )

    def digest(self) -> str:
        """SHA-256 over the names and contents of the files: equal where the contents are."""
        facts = {name: file.sha256 for name, file in sorted(self.files.items())}
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _encode_file(facts: FileFacts) -> dict[str, Any]:
    content = {"size": facts.size, "sha256": facts.sha256}
    return content if facts.sums is None else content | {"sums": facts.sums}


def _decode_file(content: Mapping[str, Any]) -> FileFacts:
    return FileFacts(
        size=fields.count_at(content, "size"),
        sha256=fields.sha256_at(content, "sha256"),
        sums=fields.sha256_at(content, "sums") if "sums" in content else None,
    )


def _encode_optimizer(optimizer: OptimizerFacts | None) -> Any:
    if optimizer is None:
        return None
    content = {
        "param_groups": encode(list(optimizer.param_groups), "param_groups"),
        "num_steps": optimizer.num_steps,
        "steps": encode(dict(optimizer.steps), "steps"),
    }
    splits = optimizer.splits
    return content if splits is None else content | {"splits": plain_splits(splits)}


def _decode_optimizer(content: Any) -> OptimizerFacts | None:
    if content is None:
        return None
    content = fields.mapping(content, "optimizer")
    groups = decode(content.get("param_groups"))
    if not isinstance(groups, list):
        raise ValueError("its param_groups are no list")
    steps = fields.mapping(decode(content.get("steps")), "steps")
    return OptimizerFacts(
        param_groups=[fields.mapping(group, "a group of parameters") for group in groups],
        num_steps=fields.count_at(content, "num_steps"),
        steps={name: fields.number_at(steps, name) for name in steps},
        splits=read_splits(content["splits"]) if "splits" in content else None,
    )


def _check_format(content: Mapping[str, Any]) -> None:
    if content.get("format") != FORMAT:
        raise ValueError(f"its format is {content.get('format')!r:.100}, not {FORMAT!r}")
    version = fields.count_at(content, "format_version")
    if version < 1:
        raise ValueError(f"there is no format version {version}")
    if version > FORMAT_VERSION:
        raise _OtherFormatError(
            f"its format version {version} is newer than {FORMAT_VERSION}, the newest that "
            "this version of dmuon reads; update dmuon to read it"
        )


def _check_head(text: str) -> None:
    length = len(_HEAD % hashlib.sha256().hexdigest())
    head, rest = text[:length], text[length:]
    if head != _HEAD % hashlib.sha256(rest.encode()).hexdigest():
        if _is_unreleased(text):
            raise _OtherFormatError(
                "it is of a format that was never released and is no longer read; the "
                "model.safetensors beside it is a file that can be read by itself"
            )
        raise ValueError(
            "it does not begin with the SHA-256 of what follows, so it has changed since it was "
            "written, or is the manifest of something else"
        )


def _is_unreleased(text: str) -> bool:
    try:
        content = parse(text)
    except ValueError:
        return False
    is_versioned = isinstance(content, dict) and "format_version" in content
    return is_versioned and "format" not in content and "attempt" in content


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a checkpoint folder.

    Raises:
        DamagedCheckpointError: there is none, or it is not what was written.
        CheckpointError: it is of a newer or another format.
    """
    folder = local_path(folder)
    if not os.path.lexists(folder / MANIFEST_FILE):
        refuse_torch_checkpoint(folder)
        what = "as there is no folder"
        if folder.is_dir():
            what = "so it is none, or writing it was never finished"
            if (folder / "config.json").is_file():
                what += " (a Hugging Face folder is one that transformers opens as it is)"
        raise DamagedCheckpointError(folder, f"it has no {MANIFEST_FILE}, {what}")
    path = file_in(folder, MANIFEST_FILE)
    try:
        with path.open("rb") as file:
            return _parse(file.read(_MOST_BYTES + 1))
    except _OtherFormatError as error:
        raise CheckpointError(folder, f"its {MANIFEST_FILE} cannot be read: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = f"its {MANIFEST_FILE} cannot be read: {error}"
        raise DamagedCheckpointError(folder, reason) from error


def refuse_torch_checkpoint(folder: Path) -> None:
    """Refuse a folder that ``torch.distributed.checkpoint`` has written.

    Raises:
        CheckpointError: it is one; the way to its weights.
    """
    if (folder / TORCH_METADATA_FILE).is_file():
        raise CheckpointError(
            folder,
            "it is a checkpoint of torch.distributed.checkpoint; `python -m "
            "torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt` makes one file "
            "of it, whose weights dmuon.set_model_state_dict takes",
        )


def _parse(data: bytes) -> Manifest:
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES} bytes")
    return Manifest.from_json(data.decode("utf-8"))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Commit a checkpoint: when this returns it survives a crash of the machine.

    Raises:
        CheckpointError: something in it is not plain data; nothing was written.
        OSError: such as on a full disk; nothing was written.
    """
    try:
        data = manifest.to_json().encode("utf-8")
        _parse(data)  # what could not be read must not replace what can
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(folder, f"its {MANIFEST_FILE} cannot be written: {error}") from error
    write_file(folder / MANIFEST_FILE, data)
