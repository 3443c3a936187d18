"""Section ``optimizer``: Muon for hidden matrices, AdamW for everything else."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from dmuon_platform.spec.section import Section

DecayRate = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSpec(Section):
    """The settings of ``dmuon.Muon``, with its names."""

    algorithm: Literal["muon", "adamw"] = "muon"
    """Of hidden matrices. With ``adamw`` the ``adamw_*`` keys hold for the whole model: a baseline
    in which all else is equal."""

    lr: NonNegativeFloat = 0.02
    """Learning rate of hidden matrices, before the schedule."""

    momentum: DecayRate = 0.95
    """Decay rate of the momentum of hidden matrices."""

    nesterov: bool = True
    """Whether the update looks one step ahead."""

    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of hidden matrices."""

    ns_steps: PositiveInt = 5
    """Newton-Schulz iterations."""

    adjust_lr_fn: Literal["match_rms_adamw", "original"] | None = "match_rms_adamw"
    """How the step grows with a matrix's shape, as in ``torch.optim.Muon``; none for not at all."""

    ns_dtype: Literal["float32", "bfloat16"] | None = None
    """Arithmetic of Newton-Schulz; none for what suits the device. float32 compares meshes."""

    adamw_lr: NonNegativeFloat = 1e-3
    """Learning rate of everything else, before the schedule."""

    adamw_betas: Annotated[tuple[DecayRate, DecayRate], Field(strict=False)] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""

    adamw_eps: PositiveFloat = 1e-8
    """What AdamW adds to its denominator."""

    adamw_weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of everything else."""
