"""The index of a Hugging Face checkpoint of several files: which file holds which weight."""

import json
from collections.abc import Mapping
from pathlib import Path

from dmuon.checkpoint import fields
from dmuon.checkpoint.facts import TensorFacts
from dmuon.checkpoint.file_names import check_plain
from dmuon.checkpoint.plain_json import parse
from dmuon.errors import DamagedCheckpointError

INDEX_FILE = "model.safetensors.index.json"
_MOST_BYTES = 64 * 2**20


def index_json(tensors: Mapping[str, Mapping[str, TensorFacts]]) -> bytes:
    """The content of the index.

    Args:
        tensors: of the model, by the name of their file and their own.
    """
    each = [facts for by_name in tensors.values() for facts in by_name.values()]
    weight_map = {name: file for file, by_name in tensors.items() for name in by_name}
    content = {
        "metadata": {"total_size": sum(facts.num_bytes for facts in each)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def read_index(path: Path) -> dict[str, str]:
    """The file of each weight, by an index that may be anybody's.

    Raises:
        DamagedCheckpointError: it is none.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_BYTES} bytes")
        weight_map = fields.texts_at(fields.mapping(parse(data), "it"), "weight_map")
        for name in set(weight_map.values()):
            check_plain(name)
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(path, f"the index cannot be read: {error}") from error
    return weight_map
