"""What one rank computes in a step."""

import math
from dataclasses import dataclass

from dmuon.errors import SetupError
from dmuon.flags import check_flags

_KEPT_IN_LAYER = 16
_RECOMPUTED = 8 / 6


@dataclass(frozen=True)
class Workload:
    """Batches and the sizes of a transformer, for what bytes and shapes do not tell.

    Attributes:
        tokens: of one micro-batch of one rank.
        num_micro_batches: of a step; only the last one sends gradients.
        layers: of the model; 0 for no estimate of activations.
        hidden: width of its residual stream.
        vocabulary: width of its logits.
        checkpointing: whether layers are computed again in the backward.
        flops_per_token: of forward and backward without recomputation; None: 6 a weight that
            multiplies, which leaves attention out.
        ns_steps: of Newton-Schulz.
        ns_itemsize: bytes of an element of its arithmetic: 2 for bfloat16, 4 for float32.

    Raises:
        SetupError: for a number out of range.
    """

    tokens: int
    num_micro_batches: int = 1
    layers: int = 0
    hidden: int = 0
    vocabulary: int = 0
    checkpointing: bool = False
    flops_per_token: float | None = None
    ns_steps: int = 5
    ns_itemsize: int = 2

    def __post_init__(self) -> None:
        check_flags(checkpointing=self.checkpointing)
        least = {"tokens": 1, "num_micro_batches": 1, "layers": 0, "hidden": 0, "vocabulary": 0}
        for name, lowest in {**least, "ns_steps": 1}.items():
            value = getattr(self, name)
            if type(value) is not int or value < lowest:
                raise SetupError(f"{name} is a whole number of {lowest} or more, got {value!r}")
        if self.flops_per_token is not None and not 0 <= self.flops_per_token < math.inf:
            raise SetupError(f"flops_per_token must be 0 or more, got {self.flops_per_token!r}")

    def flops(self, per_token: float) -> float:
        """Of a step of one rank.

        Args:
            per_token: where ``flops_per_token`` says nothing.
        """
        per_token = per_token if self.flops_per_token is None else self.flops_per_token
        again = _RECOMPUTED if self.checkpointing else 1.0
        return per_token * self.tokens * self.num_micro_batches * again

    def activation_bytes(self, itemsize: int) -> int:
        """An estimate of what a rank keeps for the backward of a micro-batch.

        Korthikanti et al. 2022 (arXiv 2205.05198, section 4): 34 bytes a token, layer and unit of
        width in 16 bits. Without dropout, whose masks are 2 of them, and with attention that keeps
        no matrix of scores, that is 16 elements. Checkpointed, a layer keeps its input, and one at
        a time the rest. Logits are there once in the dtype of the model, and once in float32 as
        logarithms of probabilities.

        Args:
            itemsize: bytes of an element.
        """
        layer = self.tokens * self.hidden * itemsize
        kept = self.layers * layer * _KEPT_IN_LAYER
        if self.checkpointing and self.layers:
            kept = self.layers * layer + layer * _KEPT_IN_LAYER
        return kept + self.tokens * self.vocabulary * (itemsize + 4)
