"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the rotate-half convention.

The two coordinates of a rotated pair are half a head apart, as in Hugging Face weights, and not
neighbours, as in the paper and in Meta's own weights.
"""

import torch
from torch import Tensor

# T: tokens of a sequence; D: width of a head; dots are any leading dimensions.


def rotary_tables(
    num_tokens: int, head_dim: int, theta: float, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of all positions, each T x D, on the device of ``like``.

    They are computed in float32, since bfloat16 cannot tell distant positions apart, and rounded
    to the type of ``like`` only at the end.
    """
    pairs = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32)
    frequencies = theta ** -(pairs / head_dim)
    positions = torch.arange(num_tokens, device=like.device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn each pair of ``x`` (... x T x D) by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos_TD + torch.cat((-second, first), dim=-1) * sin_TD
