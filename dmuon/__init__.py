"""Muon for PyTorch on many ranks: every hidden matrix has one owner, the rest stays on FSDP2."""

from typing import TYPE_CHECKING

from dmuon.errors import (
    CheckpointError,
    CollectiveError,
    DamagedCheckpointError,
    DMuonError,
    NonFiniteGradientError,
    OwnershipError,
    SetupError,
    StateDictError,
)
from dmuon.newton_schulz import (
    CLASSIC_COEFFICIENTS,
    POLAR_EXPRESS_COEFFICIENTS,
    newton_schulz,
)

if TYPE_CHECKING:
    from dmuon.on_demand import *

__version__ = "0.1.0"

__all__ = [
    "CLASSIC_COEFFICIENTS",
    "POLAR_EXPRESS_COEFFICIENTS",
    "CheckpointError",
    "Cluster",
    "CollectiveError",
    "Counters",
    "DMuonError",
    "DamagedCheckpointError",
    "Forecast",
    "Layout",
    "LoadedCheckpoint",
    "Manifest",
    "Matrix",
    "Muon",
    "NonFiniteGradientError",
    "OwnershipError",
    "Plan",
    "SaveHandle",
    "SetupError",
    "Split",
    "StateDictError",
    "UpdateStatistics",
    "Workload",
    "clip_grad_norm_",
    "dedicate_params",
    "describe",
    "describe_checkpoint",
    "diff_checkpoints",
    "export_weights",
    "get_counters",
    "get_dedicated_params",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_owned_params",
    "is_hidden_matrix",
    "list_checkpoints",
    "load_checkpoint",
    "make_plan",
    "muon_settings_from_torch",
    "newton_schulz",
    "no_sync",
    "nonfinite_gradients",
    "nonfinite_weights",
    "optimizer_state_from_torch",
    "optimizer_state_to_torch",
    "plan",
    "read_manifest",
    "read_optimizer_state",
    "save_checkpoint",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "singular_value_band",
    "verify_checkpoint",
    "verify_files",
    "wait_all_replicate_broadcasts",
    "watch_updates",
]


def __getattr__(name: str) -> object:
    """Load what was left until it is used: DTensor and FSDP2 take seconds (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dmuon import on_demand

    globals().update({each: getattr(on_demand, each) for each in on_demand.__all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
