"""A small job as plain data, and changes to it."""

import copy
from typing import Any

SMALL: dict[str, Any] = {
    "name": "small",
    "data": {"source": "python-stdlib", "sequence_length": 128},
    "train": {"steps": 10, "global_batch_size": 32, "micro_batch_size": 8},
}


def small(**changes: Any) -> dict[str, Any]:
    """Return the small job with ``section__key`` changed."""
    document = copy.deepcopy(SMALL)
    for name, value in changes.items():
        *tables, key = name.split("__")
        table = document
        for part in tables:
            table = table.setdefault(part, {})
        table[key] = value
    return document
