"""The public names that need `torch.distributed`: `dmuon` loads them when the first is used."""

from dmuon.checkpoint.description import describe_checkpoint, verify_checkpoint
from dmuon.checkpoint.difference import diff_checkpoints
from dmuon.checkpoint.export import export_weights
from dmuon.checkpoint.handle import SaveHandle
from dmuon.checkpoint.listing import list_checkpoints
from dmuon.checkpoint.loading import LoadedCheckpoint, load_checkpoint
from dmuon.checkpoint.manifest import Manifest, read_manifest
from dmuon.checkpoint.saving import save_checkpoint
from dmuon.checkpoint.torch_optim import (
    muon_settings_from_torch,
    optimizer_state_from_torch,
    optimizer_state_to_torch,
    read_optimizer_state,
)
from dmuon.checkpoint.verification import verify as verify_files
from dmuon.counters import Counters
from dmuon.dedicate import dedicate_params
from dmuon.gradients import (
    clip_grad_norm_,
    no_sync,
    nonfinite_gradients,
    wait_all_replicate_broadcasts,
)
from dmuon.inspection import (
    describe,
    get_counters,
    get_dedicated_params,
    get_owned_params,
    watch_updates,
)
from dmuon.layout import Layout, Split
from dmuon.model_state import get_model_state_dict, nonfinite_weights, set_model_state_dict
from dmuon.optimizer import Muon
from dmuon.optimizer_state import get_optimizer_state_dict, set_optimizer_state_dict
from dmuon.partition import Matrix, Plan, make_plan
from dmuon.planning.cluster import Cluster
from dmuon.planning.forecast import Forecast, plan
from dmuon.planning.workload import Workload
from dmuon.selection import is_hidden_matrix
from dmuon.update_statistics import UpdateStatistics, singular_value_band

__all__ = [
    "Cluster",
    "Counters",
    "Forecast",
    "Layout",
    "LoadedCheckpoint",
    "Manifest",
    "Matrix",
    "Muon",
    "Plan",
    "SaveHandle",
    "Split",
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
