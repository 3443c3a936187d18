"""A plan against what really happens: bytes on the way and bytes held, on gloo ranks."""

import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from live_memory import LiveMemory
from ranks_runner import run_ranks
from tiny import TinyModel, is_proj, loss_of, share, tokens
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from wrapped import make_mesh

import dmuon
from dmuon import dedication, torch_internals
from dmuon.packing import Packing
from dmuon.reduction import ExchangedReduction, RootedReduction, ScatteredReduction


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    reshard: bool = True
    num_micro_batches: int = 1
    policy: MixedPrecisionPolicy | None = None
    reduction: type[ExchangedReduction | RootedReduction] = ExchangedReduction
    packing: Packing = "auto"
    is_whole: bool = False


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES = {
    "2": Case((2,)),
    "2, kept whole": Case((2,), reshard=False),
    "2, bfloat16": Case((2,), policy=BF16),
    "4": Case((4,), num_micro_batches=2),
    "2x2": Case((2, 2)),
    "2x2, kept whole, bfloat16": Case((2, 2), reshard=False, policy=BF16),
    "2, as on NCCL": Case((2,), policy=BF16, reduction=RootedReduction, packing="owner"),
    "2x2, as on NCCL": Case((2, 2), policy=BF16, reduction=RootedReduction, packing="owner"),
    "2, as NCCL chooses": Case((2,), policy=BF16, reduction=RootedReduction, is_whole=True),
    "4, as NCCL chooses": Case((4,), policy=BF16, reduction=RootedReduction),
    "2x2, by block on NCCL": Case(
        (2, 2), reduction=RootedReduction, packing="block", is_whole=True
    ),
    "4, by block": Case((4,), num_micro_batches=2, packing="block", is_whole=True),
    "2x2, by block": Case((2, 2), policy=BF16, packing="block", is_whole=True),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_memory_are_as_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    monkeypatch.setattr(dedication, "choose_reduction", lambda group: case.reduction)
    if case.reduction is RootedReduction:
        monkeypatch.setattr(torch_internals, "backend_of", lambda group, device: "nccl")
    # when ranks take turns at few cores, how long reductions last is chance
    monkeypatch.setattr(ExchangedReduction, "is_done", exchange_is_over)
    monkeypatch.setattr(RootedReduction, "is_done", reduction_is_over)
    monkeypatch.setattr(ScatteredReduction, "is_done", exchange_is_over)

    def body(rank: int) -> None:
        torch.manual_seed(0)
        model = TinyModel(num_layers=4, hidden=200)
        forecast = dmuon.plan(
            model,
            case.shape if len(case.shape) == 2 else case.shape[0],
            dmuon.Workload(tokens=1, num_micro_batches=case.num_micro_batches),
            is_proj,
            reshard_after_forward=case.reshard,
            reshard_root=case.reshard,
            mp_policy=case.policy,
            transport="all_to_all" if case.reduction is ExchangedReduction else "reduce",
            packing=case.packing,
        )
        memory = LiveMemory()
        with memory:
            optimizer = prepare(model, case, memory)
            train(model, optimizer, case)  # makes what is made once
        assert forecast.owners == dedication.of(model).plan
        check_bytes(forecast, model, optimizer, case)
        memory.moments.clear()
        with memory:
            backward(model, case)
            dedication.of(model).engine.settle_gradients()
        check_memory(forecast.memory_of(rank), model, optimizer, memory)

    run_ranks(math.prod(case.shape), body)


def prepare(model: Any, case: Case, memory: LiveMemory) -> dmuon.Muon:
    mesh = make_mesh(*case.shape)
    policy = case.policy or MixedPrecisionPolicy()
    options: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": case.reshard}
    dmuon.dedicate_params(model, mesh, is_proj, packing=case.packing, **options)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, **options)
    for param in dmuon.get_dedicated_params(model).values():
        param.register_post_accumulate_grad_hook(lambda leaf: watch_gradient(leaf, memory))
    return dmuon.Muon(model)


def watch_gradient(leaf: torch.Tensor, memory: LiveMemory) -> None:
    """Autograd makes it, which is none of the code whose storages are followed."""
    if leaf.grad is not None:
        memory.watch([leaf.grad])
        memory.look()


def backward(model: nn.Module, case: Case) -> None:
    rows = share(tokens(0), dist.get_rank(), dist.get_world_size())
    for index, part in enumerate(rows.tensor_split(case.num_micro_batches)):
        is_last = index == case.num_micro_batches - 1
        with nullcontext() if is_last else dmuon.no_sync(model):
            loss_of(model, part).backward()


def train(model: nn.Module, optimizer: dmuon.Muon, case: Case) -> None:
    backward(model, case)
    optimizer.step()
    optimizer.zero_grad()


def check_bytes(
    forecast: dmuon.Forecast, model: nn.Module, optimizer: dmuon.Muon, case: Case
) -> None:
    """Of dedicated parameters to the byte, by our own count; all of them at the dispatcher."""
    counters = dmuon.get_counters(model)
    before = Counter(counters.bytes), Counter(counters.collectives)
    with Collectives() as seen:
        train(model, optimizer, case)
        dmuon.wait_all_replicate_broadcasts(model)
    planned, ours, calls = Counter[str](), Counter[str](), Counter[str]()
    num_shards = forecast.mesh.num_shards
    for traffic in forecast.traffic_of(dist.get_rank()):
        planned[traffic.kind] += traffic.payload
        if traffic.purpose in ("unshard", "gradients", "publish"):
            ours[traffic.kind] += traffic.payload
            calls[traffic.kind] += traffic.calls
    assert case.is_whole == ("all_gather" in ours)
    for kind in ("broadcast", "all_to_all", "reduce", "publish", "all_gather", "reduce_scatter"):
        assert (counters.bytes - before[0])[kind] == ours[kind], kind
        assert (counters.collectives - before[1])[kind] == calls[kind], kind
    assert seen.bytes["broadcast"] == planned["broadcast"] + planned["publish"]
    assert seen.bytes["alltoall_base"] == planned["all_to_all"]
    assert seen.bytes["reduce"] == planned["reduce"]
    assert seen.bytes["allgather_base"] == planned["all_gather"]
    assert seen.bytes["reduce_scatter_base"] * num_shards == planned["reduce_scatter"]
    assert seen.bytes["allreduce"] == planned["all_reduce"]


def check_memory(planned: Any, model: nn.Module, optimizer: dmuon.Muon, seen: LiveMemory) -> None:
    engine = dedication.of(model).engine
    symmetric = [param for param in model.parameters() if isinstance(param, DTensor)]
    grads = [param.grad for param in symmetric if param.grad is not None]
    parcels = [parcel for block in engine.blocks for parcel in block.parcels]
    kept = [parcel._wire for parcel in parcels if parcel.route.is_source]
    masters = [parcel.master for parcel in parcels]
    held = {
        "weights": [*symmetric, *(t for t in (*kept, *masters) if t is not None)],
        "gradients": [*grads, *engine.ledger.named_grads().values()],
        "optimizer": [t for state in optimizer.state.values() for t in state.values()],
    }
    numbers: set[int] = set()
    for what, tensors in held.items():
        found = seen.watch(map(local, tensors))
        assert seen.bytes_of(found) == pytest.approx(getattr(planned, what), rel=0.05), what
        numbers |= found
    assert seen.peak(without=numbers) == pytest.approx(planned.unsharded, rel=0.05)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def exchange_is_over(self: ExchangedReduction | ScatteredReduction) -> bool:
    if self._work is not None:
        self._work.wait()
    return True


def reduction_is_over(self: RootedReduction) -> bool:
    for work in self._works:
        work.wait()
    return True
