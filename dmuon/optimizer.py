"""``dmuon.Muon``: Muon on the owners of hidden matrices, AdamW on everything else."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from dmuon import dedication as dedications
from dmuon.adamw import adamw_
from dmuon.argument_names import refuse_other_names
from dmuon.call_order import Call
from dmuon.cuda_graphs import make_workspace
from dmuon.dedication import Dedication
from dmuon.errors import OwnershipError, SetupError
from dmuon.flags import check_flags
from dmuon.groups import Named, make_groups, numbers_of
from dmuon.muon_update import Due, update_
from dmuon.names import original_name
from dmuon.newton_schulz import POLAR_EXPRESS_COEFFICIENTS, Coefficients
from dmuon.parameter import DedicatedParam
from dmuon.parcel import MASTER_DTYPE, Parcel
from dmuon.scaling_watch import ScalingWatch
from dmuon.update_statistics import UpdateWatch


class _Witness(NamedTuple):
    param: nn.Parameter
    grad: torch.Tensor
    num_zeroed: int


class Muon(torch.optim.Optimizer):
    """One optimizer for the whole model; ``param_groups`` have the same structure on every rank.

    ``buf = momentum * buf + grad``; ``u = grad + momentum * buf`` (Nesterov) or ``buf``;
    ``W = W * (1 - lr * weight_decay) - lr * s * NewtonSchulz(u)`` with ``s`` from
    ``adjust_lr_fn`` (Jordan et al. 2024, "Muon"; arXiv 2502.16982). All other parameters follow
    ``torch.optim.AdamW``.

    Args:
        model: after ``dedicate_params`` and ``fully_shard``.
        lr: learning rate of hidden matrices.
        momentum: in ``[0, 1)``.
        nesterov: look one step ahead.
        weight_decay: decoupled, of hidden matrices.
        ns_steps: Newton-Schulz steps.
        ns_coefficients: one ``(a, b, c)`` for all steps, or one a step: the first ``ns_steps`` are
            used, and where there are fewer the last repeats.
        ns_dtype: dtype of Newton-Schulz; None: bfloat16 on accelerators, float32 on CPU.
        adjust_lr_fn: ``"match_rms_adamw"``, ``"original"`` or None.
        eps: lower bound of the norm that Newton-Schulz divides by.
        adamw_lr: learning rate of all other parameters.
        adamw_betas: their decay rates of the moments.
        adamw_eps: added to their denominator.
        adamw_weight_decay: theirs, decoupled.
        param_groups: dictionaries with ``params`` (parameters or names) and any of the settings
            above, hidden matrices by those without ``adamw_`` and the rest by those with it;
            parameters in none of them get the settings above.
        replicate_async: on a replicated mesh, let new weights travel under the next forward.

    Raises:
        SetupError: for a model that was not prepared, a setting out of range, or one by the name
            that it has elsewhere.
    """

    @refuse_other_names
    def __init__(  # noqa: PLR0913 - the public signature
        self,
        model: nn.Module,
        lr: float | torch.Tensor = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        ns_coefficients: Coefficients = POLAR_EXPRESS_COEFFICIENTS,
        ns_dtype: torch.dtype | None = None,
        adjust_lr_fn: str | None = "match_rms_adamw",
        eps: float = 1e-7,
        adamw_lr: float | torch.Tensor = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.01,
        param_groups: Sequence[Mapping[str, Any]] | None = None,
        replicate_async: bool = True,
    ) -> None:
        settings = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "ns_dtype": ns_dtype,
            "adjust_lr_fn": adjust_lr_fn,
            "eps": eps,
            "adamw_lr": adamw_lr,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
            "adamw_weight_decay": adamw_weight_decay,
        }
        if not isinstance(model, nn.Module):
            raise SetupError(
                f"Muon takes the model, not its parameters (got {type(model).__name__}): "
                "Muon(model), and for groups with settings of their own Muon(model, "
                "param_groups=[...])"
            )
        check_flags(replicate_async=replicate_async)
        self.dedication = dedications.of(model)
        self.dedication.check_not_sharded()
        self.replicate_async = replicate_async
        self.num_steps = 0
        self.update_watch: UpdateWatch | None = None
        engine = self.dedication.engine
        self.dedication.reshard_symmetric()  # the model may have been evaluated before
        named = _named_parameters(model, self.dedication)
        groups = make_groups(named, settings, param_groups)
        if self.dedication.owner_map.rank == 0:  # the others would say the same
            engine.scaling_watch = ScalingWatch(named.symmetric.values(), self.dedication.params)
        self._is_open = True
        super().__init__(groups, {})
        self._is_open = False
        self.defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        taken = set(named.all.values())
        self._left_out = [(n, p) for n, p in model.named_parameters() if p not in taken]
        self._witness: _Witness | None = None
        self._workspace = make_workspace(self.dedication.device)
        self._parcels: list[Parcel] = [p for block in engine.blocks for p in block.parcels]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Owners update their matrices; on a 1D mesh that part needs no collective, on a replicated
        one the new weights are published along ``replicate``. The first rank warns, once, when
        ``torch.nn.utils.clip_grad_norm_`` scaled gradients, which leaves out hidden matrices.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine = self.dedication.engine
        self.dedication.settle()
        self._check_same_parameters()
        self._check_not_dropped_by_hand()
        engine.settle_gradients()
        engine.order.note(Call.STEP)
        engine.order.note_settings([numbers_of(group) for group in self.param_groups])
        engine.scaling_watch.look()
        self._step_owned()
        engine.publish(wait=not self.replicate_async)
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                adamw_(group, self.state)
        self._witness = self._find_witness()
        self.num_steps += 1
        engine.counters.steps += 1
        engine.scaling_watch.tell()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, local, reduced and still on their way."""
        self.dedication.engine.zero_grad()
        self._witness = None  # holds a gradient
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: groups must be equal on all ranks and are checked once.

        Raises:
            OwnershipError: always; it names the way out.
        """
        if not self._is_open:
            raise OwnershipError(
                "groups cannot be added later; pass param_groups to dmuon.Muon(model, ...)"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> NoReturn:
        """Refused: a copied or pickled optimizer would have lost its owners.

        Raises:
            OwnershipError: always; it names the function to call.
        """
        raise OwnershipError(
            "this optimizer cannot be copied or pickled; call "
            "dmuon.get_optimizer_state_dict(model, optimizer) on every rank"
        )

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """Asked by ``GradScaler.step``, which cannot see the gradients of the owners."""
        raise OwnershipError(
            "torch.amp.GradScaler cannot unscale gradients that live on owners; use bfloat16, "
            "which needs no scaling"
        )

    def state_dict(self) -> NoReturn:
        """Refused: each rank would save its own share under numbers that mean nothing elsewhere.

        Raises:
            OwnershipError: always; it names the function to call.
        """
        raise OwnershipError(
            "the state of this optimizer lives on the owners; call "
            "dmuon.get_optimizer_state_dict(model, optimizer) on every rank"
        )

    def load_state_dict(self, state_dict: object) -> NoReturn:
        """Refused, see ``state_dict``.

        Raises:
            OwnershipError: always; it names the function to call.
        """
        raise OwnershipError(
            "the state of this optimizer lives on the owners; call "
            "dmuon.set_optimizer_state_dict(model, optimizer, state_dict) on every rank"
        )

    def _step_owned(self) -> None:
        engine = self.dedication.engine
        masters = {
            param.param: (param, weight)
            for parcel in self._parcels
            if parcel.master is not None
            for param, weight in zip(parcel.params, parcel.views(parcel.master), strict=True)
        }
        for group in self.param_groups:
            due = [
                self._due(param, weight, grad)
                for param, weight in (masters[p] for p in group["params"] if p in masters)
                if (grad := engine.ledger.grad(param)) is not None
            ]
            if due:
                with record_function("dmuon::newton_schulz"):
                    engine.counters.newton_schulz += update_(due, group, self._workspace)

    def _due(self, param: DedicatedParam, weight: torch.Tensor, grad: torch.Tensor) -> Due:
        state = self.state[param.param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight, dtype=MASTER_DTYPE)
        watch = self.update_watch
        look = None if watch is None else watch.of(param.name, param.layout)
        return Due(weight, grad, state["momentum_buffer"], param.layout, look)

    def _check_same_parameters(self) -> None:
        """Refuse to train a model that was wrapped or changed after this optimizer was built."""
        for name, param in self._left_out:
            if param.requires_grad:
                raise SetupError(
                    f"{name} was frozen and not sharded when Muon(model) was built, so nothing "
                    "averages its gradients; call fully_shard on its module, or Muon after thawing"
                )
        if self.num_steps > 0:  # it takes long to walk through the model
            return
        ours = {param for group in self.param_groups for param in group["params"]}
        for name, param in self.dedication.model.named_parameters():
            if param.requires_grad and param not in ours:
                raise SetupError(
                    f"{name} is no parameter of this optimizer: the model was wrapped or changed "
                    "after Muon(model); build the model anew and change it first, then call "
                    "dedicate_params, then fully_shard, then Muon"
                )

    def _check_not_dropped_by_hand(self) -> None:
        """Refuse ``param.grad = None`` in place of ``zero_grad``: it does not reach the owners."""
        seen = self._witness
        if seen is None or seen.num_zeroed != self.dedication.engine.num_zeroed:
            return
        if seen.param.grad is not seen.grad:
            raise OwnershipError(
                "gradients of this model were dropped or replaced by hand since the last step; "
                "those of hidden matrices live on their owners, where param.grad = None does not "
                "arrive, and would add up. Call optimizer.zero_grad() or model.zero_grad()"
            )

    def _find_witness(self) -> "_Witness | None":
        """A gradient that changes in place for as long as nobody drops it."""
        for group in self.param_groups:
            for param in group["params"] if group["algorithm"] == "adamw" else ():
                if param.grad is not None:
                    return _Witness(param, param.grad, self.dedication.engine.num_zeroed)
        return None


def _named_parameters(model: nn.Module, dedication: Dedication) -> Named:
    on_meta = [original_name(n) for n, param in model.named_parameters() if param.is_meta]
    if unfilled := [*sorted(dedication.unfilled), *on_meta]:
        raise SetupError(
            f"{unfilled[0]} and {len(unfilled) - 1} more parameters have no values, they come from "
            "the meta device; before Muon(model) call model.to_empty(device=...), then initialise "
            "or dmuon.set_model_state_dict(model, state_dict)"
        )
    owned = {param.param: param.name for param in dedication.params}
    dedicated = {name: param for param, name in owned.items()}
    symmetric: dict[str, nn.Parameter] = {}
    for name, param in model.named_parameters():
        if param in owned or not (param.is_floating_point() or param.is_complex()):
            continue
        if not isinstance(param, DTensor) and dedication.owner_map.num_owners > 1:
            if not param.requires_grad:
                continue
            raise SetupError(
                f"{name} is neither dedicated nor sharded, so its gradients would never be "
                "averaged over the ranks; call fully_shard(model, mesh=mesh) before Muon(model)"
            )
        _check_mesh_of(name, param, dedication)
        symmetric[original_name(name)] = param
    return Named(dedicated, symmetric)


def _check_mesh_of(name: str, param: nn.Parameter, dedication: Dedication) -> None:
    if not isinstance(param, DTensor):
        return
    ranks = sorted(param.device_mesh.mesh.flatten().tolist())
    ours = dist.get_process_group_ranks(dedication.owner_map.everyone)
    if ranks != sorted(ours):
        raise SetupError(
            f"fully_shard keeps {name} on ranks {ranks}, dedicate_params was given {sorted(ours)}; "
            "their gradients must be averaged over the same ranks, so give both the same mesh"
        )
