"""The model all contenders train: a small Llama-style decoder over bytes.

Letters: ``B`` batch, ``T`` tokens, ``D`` width, ``H`` heads, ``K`` width of a head.
"""

import torch
import torch.nn.functional as F
from torch import nn

from dmuon.bench.settings import Settings

_ROPE_THETA = 10_000.0  # Su et al. 2021, arXiv 2104.09864
_INITIAL_STD = 0.02  # Radford et al. 2019


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        D = settings.width
        self.num_heads = settings.heads
        self.q_proj = nn.Linear(D, D, bias=False)
        self.k_proj = nn.Linear(D, D, bias=False)
        self.v_proj = nn.Linear(D, D, bias=False)
        self.o_proj = nn.Linear(D, D, bias=False)

    def forward(self, x_BTD: torch.Tensor, turn_TK: torch.Tensor) -> torch.Tensor:
        """Attend to earlier tokens."""
        q, k, v = (
            proj(x_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        y_BHTK = F.scaled_dot_product_attention(
            _rotate(q, turn_TK), _rotate(k, turn_TK), v, is_causal=True
        )
        return self.o_proj(y_BHTK.transpose(1, 2).flatten(-2))


class DecoderBlock(nn.Module):
    """Attention and a feed-forward part (SwiGLU, arXiv 2002.05202, or GELU), each behind a norm."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        D, inner = settings.width, settings.intermediate
        self.attention_norm = nn.RMSNorm(D)
        self.attention = Attention(settings)
        self.mlp_norm = nn.RMSNorm(D)
        self.gate_proj = nn.Linear(D, inner, bias=False) if settings.gated else None
        self.up_proj = nn.Linear(D, inner, bias=False)
        self.down_proj = nn.Linear(inner, D, bias=False)

    def forward(self, x_BTD: torch.Tensor, turn_TK: torch.Tensor) -> torch.Tensor:
        """One block of the residual stream."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), turn_TK)
        y = self.mlp_norm(x_BTD)
        if self.gate_proj is None:
            return x_BTD + self.down_proj(F.gelu(self.up_proj(y)))
        return x_BTD + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Decoder(nn.Module):
    """A language model over bytes; its forward returns the loss."""

    turns: torch.Tensor

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        D = settings.width
        self.embed = nn.Embedding(settings.vocabulary, D)
        self.layers = nn.ModuleList(DecoderBlock(settings) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(D)
        self.lm_head = nn.Linear(D, settings.vocabulary, bias=False)
        turn_TK = _turns(settings.sequence, D // settings.heads)
        self.register_buffer("turns", turn_TK, persistent=False)
        for param in self.parameters():
            if param.ndim == 2:
                nn.init.normal_(param, std=_INITIAL_STD)

    def forward(self, rows_BT: torch.Tensor) -> torch.Tensor:
        """Mean loss in nats of each byte given those before it; rows hold one byte more."""
        x_BTD = self.embed(rows_BT[:, :-1])
        for layer in self.layers:
            x_BTD = layer(x_BTD, self.turns)
        logits = self.lm_head(self.norm(x_BTD)).float()
        return F.cross_entropy(logits.flatten(0, 1), rows_BT[:, 1:].flatten())


def build(settings: Settings) -> Decoder:
    """The model with the weights of ``settings.seed``, the same on every rank."""
    torch.manual_seed(settings.seed)
    return Decoder(settings)


def training_flops(settings: Settings, num_matrix_weights: int, num_tokens: int) -> int:
    """Floating point operations of forward and backward of ``num_tokens``.

    6 a token and weight of a matrix (Kaplan et al. 2020, arXiv 2001.08361), and 12 ``T D`` a token
    and layer for attention, counted without using causality.
    """
    attention = 12 * settings.layers * settings.sequence * settings.width
    return num_tokens * (6 * num_matrix_weights + attention)


def _turns(num_tokens: int, K: int) -> torch.Tensor:
    """Cosines then sines of the angle of each position and pair, side by side."""
    frequencies = _ROPE_THETA ** (-torch.arange(0, K, 2) / K)
    angles = torch.outer(torch.arange(num_tokens), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _rotate(x_BHTK: torch.Tensor, turn_TK: torch.Tensor) -> torch.Tensor:
    cos, sin = turn_TK.to(x_BHTK.dtype).chunk(2, dim=-1)
    first, second = x_BHTK.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
