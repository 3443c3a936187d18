"""From a job's ``model`` section to a module, and what other parts ask about that module."""

from pathlib import Path

import torch
from torch import Tensor, nn

from dmuon_platform.errors import SpecError
from dmuon_platform.model.decoder import LlamaDecoder, mean_cross_entropy
from dmuon_platform.model.huggingface import load_local_model, read_vocab_size
from dmuon_platform.model.settings import ModelSettings


def build_model(settings: ModelSettings, sequence_length: int, device: str = "cpu") -> nn.Module:
    """Build the model with its initial weights, drawn from the global generator.

    Args:
        settings: The ``model`` section of the job.
        sequence_length: The longest sequence it will see.
        device: Where; ``"meta"`` for shapes without values.

    Raises:
        SpecError: The sizes do not go together, or ``path`` cannot be opened.
    """
    if settings.path is not None:
        return load_local_model(Path(settings.path), sequence_length, device)
    _check(settings)
    with torch.device("meta"):  # so that values are drawn once, and not by nn.Linear before
        model = LlamaDecoder(settings)
    if device != "meta":
        model.to_empty(device=device)
        model.initialise()
    return model


def vocabulary_size(settings: ModelSettings) -> int:
    """Return how many token ids the model knows, without building it."""
    return settings.vocab_size if settings.path is None else read_vocab_size(Path(settings.path))


def layer_modules(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks, in order: the units of sharding.

    In a model from elsewhere they are the members of the largest ``ModuleList``.
    """
    if isinstance(model, LlamaDecoder):
        return list(model.model.layers)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        return []
    largest = max(lists, key=lambda one: sum(p.numel() for p in one.parameters()))
    return list(largest)


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss in nats of a batch of B x (T + 1) tokens; for any causal model."""
    logits = model(input_ids=tokens[:, :-1]).logits
    return mean_cross_entropy(logits, tokens[:, 1:])


def flops_per_token(settings: ModelSettings, sequence_length: int) -> float:
    """Return the floating-point operations of training on one token, forward and backward.

    6 for each weight that multiplies (Kaplan et al. 2020, arXiv 2001.08361), which the embedding
    does not unless it is also the head, and ``6 * layers * hidden * sequence_length`` for causal
    attention (half of the 12 in PaLM, arXiv 2204.02311, appendix B, since half is masked).
    Recomputation is not counted, as usual for MFU.
    """
    model = build_model(settings, sequence_length, device="meta")
    layers = layer_modules(model)
    embeddings = [one for one in model.modules() if isinstance(one, nn.Embedding)]
    looked_up = sum(one.weight.numel() for one in embeddings)
    head = getattr(model, "lm_head", None)
    if head is not None and any(head.weight is one.weight for one in embeddings):
        looked_up -= head.weight.numel()
    num_multiplied = sum(p.numel() for p in model.parameters()) - looked_up
    hidden = embeddings[0].embedding_dim if embeddings else 0
    return 6.0 * num_multiplied + 6.0 * len(layers) * hidden * sequence_length


def _check(settings: ModelSettings) -> None:
    num_heads, hidden = settings.num_attention_heads, settings.hidden_size
    if hidden % (2 * num_heads):
        raise SpecError(
            f"model.hidden_size is {hidden}, and model.num_attention_heads {num_heads} must divide "
            "it into heads of an even width (rotary positions turn pairs). Choose a hidden_size "
            f"that is a multiple of {2 * num_heads}."
        )
    num_kv_heads = settings.num_key_value_heads or num_heads
    if num_heads % num_kv_heads:
        fitting = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise SpecError(
            f"model.num_key_value_heads is {num_kv_heads}, which must divide "
            f"model.num_attention_heads = {num_heads}. Choose one of {fitting}."
        )
