"""How long a sequence a model from elsewhere can read."""

from collections.abc import Mapping
from typing import Any

from dmuon_platform.errors import SpecError

POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""What ``config.json`` calls the number of positions: most models; GPT-2 and its kin; MPT."""


def stated_positions(config: Mapping[str, Any]) -> int | None:
    """Return the number of positions that a ``config.json`` states, if it does."""
    found = (config.get(key) for key in POSITION_KEYS)
    return next((value for value in found if isinstance(value, int)), None)


def check_positions(config: Any, sequence_length: int) -> None:
    """Refuse sequences beyond the table of positions that a model has.

    Plain rotary positions are computed for any length, so there it says only how far the model was
    trained. Scaled ones are made for the length that is stated, so that it stays the limit.

    Args:
        config: The ``PretrainedConfig``, which knows the number also where the file is silent.
        sequence_length: Tokens of one sample.

    Raises:
        SpecError: They are more than the model has positions for.
    """
    text = config.get_text_config()
    limits = {key: getattr(text, key, None) for key in POSITION_KEYS}
    key, limit = next((item for item in limits.items() if isinstance(item[1], int)), ("", None))
    if limit is None or sequence_length <= limit or _is_plainly_rotary(text):
        return
    key = text.attribute_map.get(key, key)
    raise SpecError(
        f"data.sequence_length is {sequence_length}, but the model of model.path takes at most "
        f"{limit} tokens ({key} in its config.json). Set data.sequence_length={limit} or less."
    )


def _is_plainly_rotary(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None)
    if rope is None:  # transformers 4
        has_scaling = getattr(config, "rope_scaling", None) is not None
        return getattr(config, "rope_theta", None) is not None and not has_scaling
    of_layers = [each for each in rope.values() if isinstance(each, dict)] or [rope]
    return all(each.get("rope_type", "default") == "default" for each in of_layers)
