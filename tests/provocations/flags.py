"""Text where the library takes True or False; each call is given a `library.Ready`."""

from collections.abc import Callable

from provocations.form import Provocation
from provocations.library import Ready
from tiny import build, is_proj

import dmuon

_CALLS: list[Callable[[Ready], object]] = [
    lambda r: dmuon.dedicate_params(build(), r.mesh, is_proj, reshard_after_forward="no"),
    lambda r: dmuon.Muon(r.model, replicate_async="no"),
    lambda r: dmuon.clip_grad_norm_(r.model, 1.0, error_if_nonfinite="no"),
    lambda r: dmuon.get_model_state_dict(r.model, cpu_offload="no"),
    lambda r: dmuon.get_model_state_dict(r.model, rank0_only="no"),
    lambda r: dmuon.get_optimizer_state_dict(r.model, r.optimizer, cpu_offload="no"),
    lambda r: dmuon.get_optimizer_state_dict(r.model, r.optimizer, rank0_only="no"),
    lambda r: dmuon.set_model_state_dict(r.model, {}, strict="no"),
    lambda r: r.save(async_save="no"),
    lambda r: dmuon.load_checkpoint(r.folder, r.model, strict="no"),
    lambda r: dmuon.load_checkpoint(r.folder, r.model, convert_dtype="no"),
    lambda r: dmuon.verify_files(r.folder, None, hashes="no"),
    lambda r: dmuon.verify_files(r.folder, None, fast="no"),
    lambda r: dmuon.plan(build(), 2, dmuon.Workload(1), reshard_after_forward="no"),
    lambda r: dmuon.plan(build(), 2, dmuon.Workload(1), reshard_root="no"),
    lambda r: dmuon.Workload(1, checkpointing="no"),
]

ROWS = [
    Provocation(call, dmuon.SetupError, "got 'no'", "is either True or False") for call in _CALLS
]
