"""Everything DMuon knows about one model, and the way from plan to blocks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from dmuon import torch_internals, wrapping
from dmuon.block import Block
from dmuon.boundaries import Boundaries, Boundary, blocks_of
from dmuon.call_order import Call, CallOrder
from dmuon.carriers import choose_carrier
from dmuon.counters import Counters
from dmuon.engine import Conduct, Engine
from dmuon.errors import OwnershipError, SetupError
from dmuon.ledger import GradientLedger
from dmuon.owner_map import OwnerMap
from dmuon.packing import Packing
from dmuon.parameter import DedicatedParam
from dmuon.parcel import Parcel
from dmuon.partition import Plan
from dmuon.reduction import StartReduction, choose_reduction
from dmuon.replicas import send_first_row

_ATTRIBUTE = "_dmuon_dedication"
_OWNS = "_dmuon_owns"


@dataclass(eq=False)
class Dedication:
    """The dedicated parameters of one model; made by ``dedicate_params``, found by ``of``."""

    model: nn.Module
    plan: Plan
    owner_map: OwnerMap
    params: list[DedicatedParam]
    device: torch.device
    mp_policy: MixedPrecisionPolicy
    reshard_after_forward: bool
    hook_boundary: Boundary | None
    packing: Packing
    unfilled: set[str] = field(default_factory=set)
    wait_for_readers: Callable[[], None] | None = None
    _engine: Engine | None = None
    _leaves: list[tuple[DedicatedParam, nn.Parameter, torch.dtype]] = field(default_factory=list)
    _guards_are_off: bool = False
    _has_run_normally: bool = False

    @property
    def engine(self) -> Engine:
        """The hooks at work; the first call forms the blocks from the ``fully_shard`` structure.

        Collective over the mesh the first time.
        """
        if self._engine is None:
            self._engine = self._start()
        return self._engine

    @property
    def has_started(self) -> bool:
        """Whether the blocks are formed; before that there are no gradients."""
        return self._engine is not None

    def before_forward(self) -> None:
        """At the start of the outermost forward. Collective over the mesh, asynchronous.

        Forms the blocks if nobody has asked for the engine yet. Hooks that the root gets then run
        from the next call on, so its block, when it has one, is served here.

        Raises:
            OwnershipError: when ``fully_shard`` would make its buffers in inference mode.
        """
        self._has_run_normally |= not torch.is_inference_mode_enabled()
        if not self._has_run_normally and self._has_fsdp():
            raise OwnershipError(
                "the first forward under torch.inference_mode() would leave buffers in "
                "fully_shard that training cannot use; evaluate under torch.no_grad()"
            )
        is_new = self._engine is None
        with torch_internals.outside_inference_mode():
            self.check_unchanged()
            self.engine.enter_model()
            if is_new:
                self._serve_root()

    def after_forward(self, output: object) -> None:
        """At the end of the outermost forward. Local."""
        self.engine.leave_model(output)

    def check_not_sharded(self) -> None:
        """Refuse a model whose matrices were taken by a ``fully_shard`` that came too late.

        Raises:
            SetupError: naming one of them.
        """
        for param in self.params:
            if isinstance(param.param, DTensor):
                raise SetupError(
                    f"{param.name} was sharded by fully_shard although it has an owner; call "
                    "fully_shard right after dedicate_params, before the model is used, or give it "
                    "ignored_params=set(dmuon.get_dedicated_params(model).values())"
                )

    def _serve_root(self) -> None:
        for index, block in enumerate(self.engine.blocks):
            if block.module is self.model:
                self.engine.pre_forward(index)

    def settle(self) -> None:
        """Put every weight into its resting place, so that it may be read or changed. Local.

        ``fully_shard`` keeps a module unsharded after a forward without backward (its root always)
        and would go on computing with those weights after they were updated. A save that still
        copies weights is waited for.
        """
        if self.wait_for_readers is not None:
            self.wait_for_readers()
            self.wait_for_readers = None
        self.engine.settle_weights()
        self.reshard_symmetric()

    def reshard_symmetric(self) -> None:
        """Make ``model.parameters()`` give the sharded parameters, which have the gradients. Local.

        After a forward without backward ``fully_shard`` shows whole ones that have none.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def settle_for(self, call: Call) -> None:
        """Before weights or state are read or set: all ranks must, and nothing may be under way.

        Collective over the mesh.

        Raises:
            CollectiveError: on every rank, when another one calls something else.
        """
        self.engine.order.begin_and_check(call)
        self.settle()

    def _has_fsdp(self) -> bool:
        return any(isinstance(module, FSDPModule) for module in self.model.modules())

    @contextmanager
    def guards_off(self) -> Iterator[None]:
        """Let ``model.state_dict()`` through, for this package's own walk over its names."""
        self._guards_are_off = True
        try:
            yield
        finally:
            self._guards_are_off = False

    def guard(self, *_: object, **__: object) -> None:
        """Refuse plain state-dict calls: they would meet placeholders instead of weights."""
        if not self._guards_are_off:
            raise OwnershipError(
                "the hidden matrices of this model live on their owner ranks, so state_dict() and "
                "load_state_dict() cannot see them; use dmuon.get_model_state_dict(model) and "
                "dmuon.set_model_state_dict(model, state_dict) on every rank"
            )

    def refuse_copy(self, *_: object) -> NoReturn:
        """Refuse deepcopy, pickle and ``torch.save``: a copy would hold placeholders.

        Raises:
            OwnershipError: always; it names the way out.
        """
        raise OwnershipError(
            "a model with dedicated parameters cannot be copied, pickled or saved as an object; "
            "use dmuon.get_model_state_dict(model), and load it into a model that is built anew"
        )

    def check_unchanged(self) -> None:
        """Refuse a model whose matrices are no longer those that have owners. Local.

        Raises:
            SetupError: naming the first that was replaced, converted or moved.
        """
        for param, leaf, dtype in self._leaves:
            if param.param is not leaf or leaf.dtype != dtype or leaf.device != self.device:
                raise SetupError(
                    f"{param.name} was replaced, converted, moved or given to fully_shard after "
                    f"dedicate_params (it was {dtype} on {self.device}); its weights live on owner "
                    f"{param.owner}, where such a change does not arrive. Convert the model before "
                    "dedicate_params, wrap it right after, and load other weights with "
                    "dmuon.set_model_state_dict"
                )

    def _check_same_modules(self) -> None:
        modules = set(self.model.modules())
        for param in self.params:
            for module, attribute in param.sites:
                leaf = module._parameters.get(attribute)
                found = None if leaf is None else (leaf.shape, leaf.dtype)
                if module not in modules or found != (param.shape, param.dtype):
                    raise SetupError(
                        f"{param.name} was replaced, removed or converted after dedicate_params; "
                        "change the model first, then give its matrices their owners"
                    )

    def _check_same_precision(self) -> None:
        """A block computes in one dtype, so both calls must have been given the same policy."""
        ours = self.mp_policy.param_dtype
        for name, module in self.model.named_modules():
            inside = set(module.modules())
            if not isinstance(module, FSDPModule):
                continue
            theirs = torch_internals.compute_dtype_of(module)
            served = [p for p in self.params if any(site in inside for site, _ in p.sites)]
            if any((ours or param.dtype) != (theirs or param.dtype) for param in served):
                raise SetupError(
                    f"fully_shard computes {name or 'the model'} in {theirs or 'its own dtype'}, "
                    f"dedicate_params was given {ours or 'no param_dtype'}; give both the same "
                    "mp_policy"
                )

    def _start(self) -> Engine:
        self._check_same_modules()
        self.check_not_sharded()
        self._check_same_precision()
        for param in self.params:
            for module, _ in param.sites:
                wrapping.reveal(module)
        start = choose_reduction(self.owner_map.everyone)
        blocks = self._make_blocks(start)
        num_legs = max((len(p.route.reduce) for block in blocks for p in block.parcels), default=0)
        if self.owner_map.num_replicas > 1:
            num_legs = 2
        counters = Counters()
        order = CallOrder(self.owner_map.control, counters)
        ledger = GradientLedger(self.owner_map.num_owners, num_legs, start, order, counters)
        conduct = Conduct(
            self.mp_policy.reduce_dtype,
            self.reshard_after_forward,
            can_recover=lambda: not self._has_fsdp(),
        )
        send_first_row(self.model)
        self._leaves = [
            (param, param.param, parcel.dtype)
            for block in blocks
            for parcel in block.parcels
            for param in parcel.params
        ]
        engine = Engine(blocks, ledger, order, counters, conduct)
        wrapping.follow_gradient_sync(self.model, engine)
        return engine

    def _make_blocks(self, start: StartReduction) -> list[Block]:
        by_block: dict[str, list[DedicatedParam]] = {}
        for param, block in zip(self.params, self.blocks_of_params(), strict=True):
            by_block.setdefault(block, []).append(param)
        order = {name: place for place, (name, _) in enumerate(self.model.named_modules())}
        names = sorted(by_block, key=order.__getitem__)
        return [self._make_block(name, by_block[name], start) for name in names]

    def _make_block(self, name: str, params: list[DedicatedParam], start: StartReduction) -> Block:
        by_owner: dict[tuple[int, torch.dtype], list[DedicatedParam]] = {}
        for param in params:
            dtype = self.mp_policy.param_dtype or param.dtype
            by_owner.setdefault((param.owner, dtype), []).append(param)
        parcels = []
        for (owner, dtype), group in sorted(by_owner.items(), key=lambda item: str(item[0])):
            parcel = Parcel(owner, group, self.owner_map.route(owner), dtype, self.device)
            parcel.adopt([self._value(param) for param in group])
            parcels.append(parcel)
        carrier = choose_carrier(parcels, self.packing, self.mp_policy.reduce_dtype, start)
        return Block(name, self.model.get_submodule(name), parcels, carrier)

    def _value(self, param: DedicatedParam) -> torch.Tensor:
        if param.param.is_meta:
            self.unfilled.add(param.name)
            param.materialize(self.device)
        return param.param.detach()

    def blocks_of_params(self) -> list[str]:
        """For each parameter the name of the module whose hooks serve it."""
        return blocks_of(self.params, Boundaries(self.model, self.hook_boundary))


def attach(dedication: Dedication) -> None:
    """Make ``of(model)`` find ``dedication``, and its parameters known as taken."""
    dedication.model.__dict__[_ATTRIBUTE] = dedication
    for param in dedication.params:
        for module, _ in param.sites:
            module.__dict__[_OWNS] = True


def is_taken(module: nn.Module) -> bool:
    """Whether some parameter of ``module`` itself is dedicated already."""
    return _OWNS in module.__dict__


def of(model: nn.Module) -> Dedication:
    """The dedication of ``model``.

    Raises:
        SetupError: when it is no model, or ``dedicate_params`` was not called on it.
    """
    if not isinstance(model, nn.Module):
        raise SetupError(
            f"this needs the model that was given to dmuon.dedicate_params, got "
            f"{type(model).__name__}"
        )
    dedication = find(model)
    if dedication is None:
        raise SetupError(
            f"this {type(model).__name__} has no dedicated parameters; call "
            "dmuon.dedicate_params(model, mesh) on the outermost module first"
        )
    return dedication


def find(model: nn.Module) -> Dedication | None:
    """The dedication of ``model``, through wrappers such as ``torch.compile``'s; or None."""
    found = getattr(model, _ATTRIBUTE, None)
    return found if isinstance(found, Dedication) else None
