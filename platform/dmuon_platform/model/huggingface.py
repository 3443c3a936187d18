"""Models from and for Hugging Face ``transformers``; the only file that imports it."""

import json
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dmuon_platform.errors import SpecError
from dmuon_platform.model.positions import check_positions, stated_positions
from dmuon_platform.model.settings import ModelSettings
from dmuon_platform.model.weights import has_weights
from dmuon_platform.spec.user_path import where_from

MOST_MODULES = {"layers": 1000, "layer": 1000, "experts": 10_000}
"""By the last word of what ``config.json`` calls their number, such as ``num_hidden_layers``."""


def hf_config(
    settings: ModelSettings, sequence_length: int, separator_id: int | None = None
) -> dict[str, Any]:
    """Return the ``config.json`` that opens this model's weights in ``transformers``.

    Args:
        settings: The ``model`` section of the job.
        sequence_length: The longest sequence it was trained on.
        separator_id: The token between documents, which then begins and ends a text.
    """
    if settings.path is not None:
        config = read_config(Path(settings.path))
        stated = config.get("max_position_embeddings")
        if isinstance(stated, int):  # rotary positions can be trained beyond what they came with
            config["max_position_embeddings"] = max(stated, sequence_length)
        # Weights are kept in float32, whatever they came in; transformers 4 and 5 look in turn.
        return {**config, "torch_dtype": "float32", "dtype": "float32"}
    num_heads = settings.num_attention_heads
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": settings.vocab_size,
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.num_hidden_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": settings.num_key_value_heads or num_heads,
        "head_dim": settings.hidden_size // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": sequence_length,
        "rms_norm_eps": settings.rms_norm_eps,
        "rope_theta": settings.rope_theta,  # where transformers 4 looks
        "rope_parameters": {"rope_type": "default", "rope_theta": settings.rope_theta},  # and 5
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": settings.tie_word_embeddings,
        "initializer_range": settings.initializer_range,
        "use_cache": True,
        "torch_dtype": "float32",
        # Never left out: the defaults 1 and 2 would be bytes like any other.
        "bos_token_id": separator_id,
        "eos_token_id": separator_id,
        "pad_token_id": None,
    }


def load_local_model(folder: Path, sequence_length: int, device: str) -> nn.Module:
    """Build the model of a local Hugging Face folder in float32, with its weights if it has any.

    A run that has a checkpoint goes on without them. Nothing is ever downloaded. On ``"meta"`` the
    model is built without values.

    Raises:
        SpecError: `transformers` is missing, or the folder holds no causal language model, or one
            for shorter sequences.
    """
    config_dict = read_config(folder)
    _check_counts(folder, config_dict)
    transformers = _transformers(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        check_positions(config, sequence_length)
        if device == "meta" or not has_weights(folder):
            with torch.device(device):
                return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32
        )
    except SpecError:
        raise
    except Exception as error:  # whatever the model's own code makes of its config.json
        raise SpecError(
            f"model.path: {folder} does not open as a causal language model: "
            f"{type(error).__name__}: {error}"
        ) from error
    return model.to(device)


def warn_of_length(folder: Path, sequence_length: int) -> None:
    """Say so where a model is trained on sequences beyond the positions that it comes with."""
    stated = stated_positions(read_config(folder))
    if stated is not None and sequence_length > stated:
        warnings.warn(
            f"data.sequence_length is {sequence_length}, and the model of model.path states "
            f"{stated} positions in its config.json. Its rotary positions go on beyond, where it "
            f"knows nothing yet; data.sequence_length={stated} stays within what it knows",
            stacklevel=2,
        )


def read_vocab_size(folder: Path) -> int:
    """Return the vocabulary size in the folder's ``config.json``."""
    config = read_config(folder)
    try:
        return int(config["vocab_size"])
    except KeyError:
        raise SpecError(
            f"model.path: {folder}/config.json names no vocab_size, so it is not a language model "
            "that can be trained here."
        ) from None


def _check_counts(folder: Path, config: dict[str, Any]) -> None:
    """Refuse numbers of modules that would only be built for hours."""
    for key, value in config.items():
        for word, most in MOST_MODULES.items():
            is_count = isinstance(value, int) and key.rpartition("_")[2] == word
            if is_count and not 0 <= value <= most:
                raise SpecError(
                    f"model.path: {folder}/config.json has {key} = {value}, where at most {most} "
                    "can be trained here; correct it"
                )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a model's folder.

    Raises:
        SpecError: There is none that can be read.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        is_there = folder.is_dir()
        where = "" if is_there else where_from(folder)
        found = "holds no config.json" if is_there else f"there is no such folder{where}"
        raise SpecError(
            f"model.path: {folder}: {found}. It must be a local folder written by "
            "save_pretrained; hub names are not downloaded. To train the model of an earlier run "
            "further, name the folder `export` of that run: it stays, while checkpoints are "
            "removed when newer ones come."
        ) from None
    except (OSError, ValueError) as error:
        raise SpecError(f"model.path: {file} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise SpecError(f"model.path: {file} must hold a JSON object; name a folder of a model")
    return config


def _transformers(folder: Path) -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise SpecError(
            f"model.path = {str(folder)!r} needs the package `transformers`, which is not "
            "installed. Install the extra: pip install 'dmuon[hf]'; or leave model.path out to "
            "train the built-in model."
        ) from error
    return transformers
