"""What a run can go on with changed, and what would make it another run."""

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


def differences_that_forbid_resume(earlier: "JobSpec", later: "JobSpec") -> list[str]:
    """Return the keys outside `MAY_CHANGE` that differ, as ``key: old -> new``."""
    was, now = (flat(one.model_dump(mode="json")) for one in (earlier, later))
    return [
        f"{key}: {was.get(key)!r} -> {now.get(key)!r}"
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != now.get(key) and not _may_change(key)
    ]


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
