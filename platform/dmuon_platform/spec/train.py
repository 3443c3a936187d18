"""Section ``train``: how long, how much at a time, and with what arithmetic."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from dmuon_platform.spec.problem import Problem
from dmuon_platform.spec.section import Section


class TrainSpec(Section):
    """One optimizer step takes ``global_batch_size`` sequences, whatever the workers."""

    steps: PositiveInt | None = None
    """Optimizer steps of the whole run. Either this or ``tokens``."""

    tokens: PositiveInt | None = None
    """Tokens of the whole run, rounded up to whole steps. Either this or ``steps``."""

    global_batch_size: PositiveInt = Field(examples=[32])
    """Sequences of one optimizer step, over all workers."""

    micro_batch_size: PositiveInt = Field(examples=[8])
    """Sequences a worker puts through the model at once; memory, not the result, depends on it."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of forward and backward. Weights and optimizer state stay float32."""

    compile: bool = False
    """Whether ``torch.compile`` is applied to each block."""

    activation_checkpointing: bool = False
    """Whether blocks are computed again in the backward instead of remembered."""

    clip_grad_norm: PositiveFloat | None = 1.0
    """Largest norm of the whole gradient; none for no clipping."""

    seed: NonNegativeInt = Field(0, lt=2**63)
    """Of the initial weights, the order of samples, and everything random."""

    reshard_after_forward: bool = True
    """Whether a block's weights are freed between forward and backward."""

    def problems(self) -> Iterator[Problem]:
        """Yield a length said twice, or not at all."""
        if (self.steps is None) == (self.tokens is None):
            said = "neither is there" if self.steps is None else "both are there"
            yield Problem(
                "train.steps",
                f"exactly one of train.steps and train.tokens says how long to train, and {said}",
                "write train.steps = 1000, say"
                if self.steps is None
                else "remove one of the two (--set train.tokens=none)",
                reads=("train.tokens",),
            )
