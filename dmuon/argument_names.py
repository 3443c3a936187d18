"""What other optimizers call the settings of ``dmuon.Muon``, for messages."""

import inspect
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec

from dmuon.errors import SetupError

P = ParamSpec("P")

_MOST_SHOWN = 80  # characters of a name

_HERE = {
    **dict.fromkeys(("params", "muon_params"), "the model itself"),
    **dict.fromkeys(("use_muon", "adamw_params"), "the predicate of dedicate_params"),
    **dict.fromkeys(("split_qkv", "is_qkv_fn"), "splits of dedicate_params"),
    **dict.fromkeys(("muon_lr", "learning_rate"), "lr"),
    **dict.fromkeys(("mu", "momentum_beta", "muon_momentum"), "momentum"),
    "use_nesterov": "nesterov",
    "wd": "weight_decay, and adamw_weight_decay for what AdamW updates",
    **dict.fromkeys(("backend_steps", "num_ns_steps"), "ns_steps"),
    "coefficient_type": "ns_coefficients",
    "fp32_matmul_prec": "ns_dtype",
    **dict.fromkeys(("rms_scale", "adjust_lr", "scale_mode", "extra_scale_factor"), "adjust_lr_fn"),
    "epsilon": "eps",
    "adam_lr": "adamw_lr",
    **dict.fromkeys(("betas", "adam_betas"), "adamw_betas"),
    "adam_eps": "adamw_eps",
    "adamw_wd": "adamw_weight_decay",
}
"""Names in ``torch.optim.AdamW`` and in other Muons, among them those of the table in MOVING.md."""
_WITHOUT_COUNTERPART = (
    *("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"),  # torch's AdamW
    *("backend", "rank", "world_size"),  # Keller Jordan's first Muon
    *("distributed_mesh", "flatten", "use_triton", "newton_schulz_func", "cautious_wd"),  # dion
    *("pg_collection", "tp_mode", "use_decoupled_weight_decay", "weight_decay_method"),  # Megatron
)


def refuse_other_names(function: Callable[P, None]) -> Callable[P, None]:
    """Let ``function`` refuse keywords that it does not have by what they are called here."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        if unknown := [name for name in kwargs if name not in known]:
            raise SetupError(explain("Muon(...)", unknown, known))
        function(*args, **kwargs)

    return checked


def explain(where: str, unknown: Iterable[object], known: Collection[str]) -> str:
    """The message for settings that ``where`` does not have."""
    told = "; ".join(_explain(_shown(name), known) for name in unknown)
    return f"{where} was given what it does not take: {told}. It takes {', '.join(known)}"


def _shown(name: object) -> str:
    text = name if isinstance(name, str) and name.isidentifier() else repr(name)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _explain(name: str, known: Collection[str]) -> str:
    if name in _HERE:
        return f"{name} is {_HERE[name]} here"
    if name in _WITHOUT_COUNTERPART:
        return f"{name} has no counterpart here, leave it out"
    nearest = get_close_matches(name, known, 1)
    return f"{name} is unknown" + (f", the nearest is {nearest[0]}" if nearest else "")
