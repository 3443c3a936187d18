"""The built-in decoder: Llama, with the parameter names of Hugging Face ``LlamaForCausalLM``."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmuon_platform.model.rotary import rotary_tables, rotate
from dmuon_platform.model.settings import ModelSettings

# B: sequences; T: tokens of a sequence; H: hidden size; V: vocabulary; D: width of a head.


class CausalLMOutput(NamedTuple):
    """What a forward returns; a named tuple, so that FSDP2 finds the tensors inside."""

    loss: Tensor | None
    """Mean cross-entropy in nats a token, float32; None without labels."""
    logits: Tensor
    """B x T x V."""


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467), in float32 whatever comes in."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with a mean square of one over its last dimension, scaled."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key and value heads."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        hidden, num_heads = settings.hidden_size, settings.num_attention_heads
        self.head_dim = hidden // num_heads
        kv_size = (settings.num_key_value_heads or num_heads) * self.head_dim
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_BTH: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Return each position's mixture of what it and the positions before it hold."""
        query = rotate(self._heads(self.q_proj(x_BTH)), cos_TD, sin_TD)
        key = rotate(self._heads(self.k_proj(x_BTH)), cos_TD, sin_TD)
        value = self._heads(self.v_proj(x_BTH))
        groups = query.shape[1] // key.shape[1]
        if groups > 1:  # not enable_gqa=: not every attention backend has it
            key = key.repeat_interleave(groups, dim=1)
            value = value.repeat_interleave(groups, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        # B x T x (heads * D) -> B x heads x T x D
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """Gated feed-forward layer (arXiv 2002.05202)."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        hidden, inner = settings.hidden_size, settings.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x_BTH: Tensor) -> Tensor:
        """Return the layer's output, position by position."""
        return self.down_proj(F.silu(self.gate_proj(x_BTH)) * self.up_proj(x_BTH))


class DecoderLayer(nn.Module):
    """One block: what is wrapped, sharded, recomputed and compiled as a unit."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(settings.hidden_size, settings.rms_norm_eps)
        self.self_attn = Attention(settings)
        self.post_attention_layernorm = RMSNorm(settings.hidden_size, settings.rms_norm_eps)
        self.mlp = SwiGLU(settings)

    def forward(self, x_BTH: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Add attention, then the feed-forward layer, to the residual stream."""
        x_BTH = x_BTH + self.self_attn(self.input_layernorm(x_BTH), cos_TD, sin_TD)
        return x_BTH + self.mlp(self.post_attention_layernorm(x_BTH))


class DecoderStack(nn.Module):
    """Embedding, blocks and the last norm: the ``model.`` part of the names."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(settings.vocab_size, settings.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(settings) for _ in range(settings.num_hidden_layers)
        )
        self.norm = RMSNorm(settings.hidden_size, settings.rms_norm_eps)
        self._head_dim = settings.hidden_size // settings.num_attention_heads
        self._theta = settings.rope_theta

    def forward(self, input_ids_BT: Tensor) -> Tensor:
        """Return the last hidden states, B x T x H."""
        x_BTH = self.embed_tokens(input_ids_BT)
        # Computed, not kept as buffers: nothing to save, shard, or fill after the meta device.
        cos, sin = rotary_tables(input_ids_BT.shape[1], self._head_dim, self._theta, x_BTH)
        for layer in self.layers:
            x_BTH = layer(x_BTH, cos, sin)
        return self.norm(x_BTH)


class LlamaDecoder(nn.Module):
    """A decoder-only language model.

    Built on the meta device it holds no values: call ``to_empty(device=...)`` and then
    :meth:`initialise`, or load a state dict with ``assign=True`` and then :meth:`tie_weights`.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.model = DecoderStack(settings)
        self.lm_head = nn.Linear(settings.hidden_size, settings.vocab_size, bias=False)
        self._is_tied = settings.tie_word_embeddings
        self._std = settings.initializer_range
        self.tie_weights()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        """Predict each next token.

        Args:
            input_ids: B x T token ids.
            labels: B x T, the id that *follows* each input id, -100 where none counts. Unlike in
                ``transformers`` they are already shifted: a sample of T + 1 tokens gives both.
        """
        logits = self.lm_head(self.model(input_ids))
        loss = None if labels is None else mean_cross_entropy(logits, labels)
        return CausalLMOutput(loss, logits)

    def tie_weights(self) -> None:
        """Make the head the embedding again, where the settings say so; else do nothing."""
        if self._is_tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw all weights anew: normal matrices, norms of one, from the global generator."""
        self.tie_weights()
        for parameter in self.parameters():
            if parameter.ndim == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=self._std)


def mean_cross_entropy(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Return the mean over all labels that are not -100, in nats, computed in float32."""
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), labels_BT.flatten())
