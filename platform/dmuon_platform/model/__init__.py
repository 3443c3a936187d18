"""The models a job can train: a built-in Llama-style decoder, or a local Hugging Face folder."""

from dmuon import is_hidden_matrix as is_hidden
from dmuon_platform.model.build import (
    build_model,
    flops_per_token,
    layer_modules,
    next_token_loss,
    vocabulary_size,
)
from dmuon_platform.model.decoder import CausalLMOutput, LlamaDecoder
from dmuon_platform.model.huggingface import hf_config, warn_of_length
from dmuon_platform.model.settings import ModelSettings
from dmuon_platform.model.weights import check_weights, has_weights

__all__ = [
    "CausalLMOutput",
    "LlamaDecoder",
    "ModelSettings",
    "build_model",
    "check_weights",
    "flops_per_token",
    "has_weights",
    "hf_config",
    "is_hidden",
    "layer_modules",
    "next_token_loss",
    "vocabulary_size",
    "warn_of_length",
]
