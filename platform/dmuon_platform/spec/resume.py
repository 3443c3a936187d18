"""What a run can go on with changed, and what would make it another run."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmuon_platform.spec.job import JobSpec

MAY_CHANGE = (
    "storage",  # where the folder is called from elsewhere, say a mount
    "checkpoint",
    "evaluation",
    "export",
    "faults",
    "mesh",
    "resources",
    "tracking",
    "train.activation_checkpointing",
    "train.compile",
    "train.micro_batch_size",
    "train.reshard_after_forward",
    "train.steps",
    "train.tokens",
)
"""Sections and keys that do not change what the finished steps have computed."""

PATHS = ("model.path", "data.tokenizer")
"""Keys that workers read, so they are made absolute."""

UPLOADED_FOLDERS = "working_dir_files"
"""Ray unpacks what ``--working-dir`` uploads below a folder of this name, each into its own."""


def base_folder() -> Path:
    """Return the folder at which a relative ``storage`` starts in this process.

    Inside ``ray job submit`` the working folder is a copy that goes with the cluster, so there it
    is the home folder of the cluster's user.
    """
    here = Path.cwd()
    return Path.home() if UPLOADED_FOLDERS in here.parts else here


def differences_that_forbid_resume(earlier: "JobSpec", later: "JobSpec") -> list[str]:
    """Return the keys outside `MAY_CHANGE` that differ, as ``key: old -> new``."""
    return [each for each in differences(earlier, later) if not _may_change(each.split(":")[0])]


def differences(earlier: "JobSpec", later: "JobSpec") -> list[str]:
    """Return all keys that differ, as ``key: old -> new``; paths of other uploads do not."""
    was, now = (flat(one.model_dump(mode="json")) for one in (earlier, later))
    return [
        f"{key}: {was.get(key)!r} -> {now.get(key)!r}"
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != now.get(key)
        if not (key in PATHS and _is_one_place(was.get(key), now.get(key)))
    ]


def _is_one_place(was: str | None, now: str | None) -> bool:
    """Tell whether paths differ only in the folder that was uploaded, or that was current."""
    if was is None or now is None:
        return False
    earlier, later = _below_uploaded(was), _below_uploaded(now)
    if not Path(was).is_absolute():
        return later[-len(earlier) :] == earlier
    return earlier == later


def _below_uploaded(path: str) -> tuple[str, ...]:
    parts = Path(path).parts
    return parts[parts.index(UPLOADED_FOLDERS) + 2 :] if UPLOADED_FOLDERS in parts else parts


def _may_change(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)


def flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, with dotted keys."""
    result: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = value
    return result
