"""The planner's arithmetic by hand, its agreement with ``dedicate_params``, and its advice."""

import gc
import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon
from dmuon import Cluster, Workload

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDTH = 64


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)))


class Model(nn.Module):
    def __init__(self, num_layers: int, hidden: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, WIDTH)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(num_layers))
        self.lm_head = nn.Linear(WIDTH, 1000, bias=False)


def meta(num_layers: int, hidden: int = 256) -> Model:
    with torch.device("meta"):
        return Model(num_layers, hidden)


def test_traffic_by_link_is_that_of_rings() -> None:
    """4 machines of 4, a replica on two of them: 2 x 8."""
    cluster = Cluster("h100", gpus_per_node=4, intra=400e9, inter=50e9, latency=0.0)
    forecast = dmuon.plan(meta(8), (2, 8), Workload(tokens=1), cluster=cluster, mp_policy=BF16)
    numel = 8 * 2 * WIDTH * 256
    found = {(each.purpose, each.axis): each for each in forecast.traffic}
    unshard = found["unshard", "shard"]
    assert unshard.payload == 2 * numel * 15 / 8  # twice but for the last layer, in 16 bits
    assert unshard.sent == unshard.payload * 7 / 8
    assert unshard.inter == unshard.sent / 4  # one hop in four
    assert unshard.seconds == pytest.approx(unshard.payload / 4 / 50e9)  # one root after another
    publish = found["publish", "replicate"]
    assert publish.payload == 2 * numel // 8
    assert (publish.intra, publish.inter) == (0, publish.payload / 2)
    reduced = found["gradients", "shard"], found["gradients", "replicate"]
    flags = 16
    assert [each.payload for each in reduced] == [4 * (numel + flags), 4 * (numel + flags) // 8]
    assert sum(each.payload for each in forecast.adamw_traffic if each.axis == "shard") > (
        found["all-gather", "shard"].payload + numel
    )


def test_blocks_that_travel_whole_are_planned_as_such() -> None:
    """Two ranks, whose shares of a layer are equal: each sends its own at the same time."""
    model, cluster = meta(8), Cluster("h100")

    def plan(mesh: int | tuple[int, int], **options: Any) -> dmuon.Forecast:
        return dmuon.plan(model, mesh, Workload(tokens=1), cluster=cluster, **options)

    chosen, by_owner = plan(2, mp_policy=BF16), plan(2, mp_policy=BF16, packing="owner")
    assert (chosen.num_whole_blocks, by_owner.num_whole_blocks) == (8, 0)
    whole = {each.purpose: each for each in chosen.traffic}
    apart = {each.purpose: each for each in by_owner.traffic}
    assert (whole["unshard"].kind, whole["gradients"].kind) == ("all_gather", "reduce_scatter")
    assert whole["unshard"].calls == 15 == apart["unshard"].calls / 2
    assert whole["unshard"].payload == apart["unshard"].payload
    for purpose in ("unshard", "gradients"):
        assert whole[purpose].seconds == pytest.approx(apart[purpose].seconds / 2, rel=0.01)
    assert plan(2, transport="all_to_all").num_whole_blocks == 0
    assert plan((8, 1)).num_whole_blocks == 0
    assert plan(8, packing="block").to_dict()["whole_blocks"] == 8
    with pytest.raises(dmuon.SetupError, match="packing is one of auto, owner, block; got 'all'"):
        plan(2, packing="all")


def test_memory_at_rest_is_counted_by_hand() -> None:
    forecast = dmuon.plan(meta(8), (2, 2), Workload(tokens=1), mp_policy=BF16)
    matrix, symmetric = WIDTH * 256, 2 * 1000 * WIDTH + 8 * 2 * WIDTH
    memory = forecast.memory_of(3)  # owns 4 of 16, and is the source of as many for its replica
    assert memory.weights == 4 * 4 * matrix + 8 * 2 * matrix + 4 * symmetric // 2
    assert memory.gradients == 4 * 4 * matrix + 4 * symmetric // 2
    assert memory.optimizer == 4 * 4 * matrix + 2 * 4 * symmetric // 2
    assert forecast.adamw_memory.weights == 4 * (16 * matrix + symmetric) // 2


def test_activations_and_operations_follow_the_workload() -> None:
    whole = Workload(tokens=10, layers=4, hidden=8)
    assert whole.activation_bytes(2) == 4 * 10 * 8 * 32
    again = Workload(tokens=10, layers=4, hidden=8, checkpointing=True, num_micro_batches=3)
    assert again.activation_bytes(2) == 4 * 10 * 8 * 2 + 10 * 8 * 32
    assert again.flops(6.0) == pytest.approx(6 * 10 * 3 * 8 / 6)
    forecast = dmuon.plan(meta(2), 2, Workload(tokens=10))
    multiplied = 4 * WIDTH * 256 + 1000 * WIDTH + 4 * WIDTH  # all but the embedding
    assert forecast.flops == 6 * multiplied * 10
    share = forecast.newton_schulz_share
    assert share == sum(forecast.newton_schulz) / (sum(forecast.newton_schulz) + 2 * forecast.flops)


def test_a_plan_is_plain_data_and_leaves_the_model_alone() -> None:
    model = meta(3)
    before = dict(model.named_parameters())
    forecast = dmuon.plan(model, 4, Workload(tokens=8), cluster=Cluster("a100"))
    data = json.loads(json.dumps(forecast.to_dict()))
    assert data["owners"] == {
        matrix.name: owner
        for matrix, owner in zip(forecast.owners.matrices, forecast.owners.owners, strict=True)
    }
    assert data["time"]["total"] == pytest.approx(
        data["adamw_time"]["total"] * (1 + data["overhead"])
    )
    assert dict(model.named_parameters()) == before
    assert gc.isenabled()


def advice(model: nn.Module, mesh: int | tuple[int, int], tokens: int) -> str:
    forecast = dmuon.plan(
        model, mesh, Workload(tokens=tokens), cluster=Cluster("h100"), mp_policy=BF16
    )
    return "\n".join(forecast.advice)


def test_advice_names_what_limits() -> None:
    assert "60 of 64 ranks own no matrix: there are 4" in advice(meta(2), 64, 10**6)
    lopsided = meta(12, 32)
    lopsided.layers[3] = Layer(8192).to("meta")
    assert "layers.3.up alone is" in advice(lopsided, 8, 10**6).replace(".weight", "")
    assert "mesh 8 x 8 (replicate x shard) would take" in advice(meta(40), (1, 64), 64)
    assert "times the tokens" not in advice(meta(40), 8, 10**8)
    assert "GB: shard over more ranks" in advice(meta(4, 10**8), 4, 1)


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(dmuon.SetupError, match="there is no GPU 'h900'; choose one of a100"):
        Cluster("h900")
    with pytest.raises(dmuon.SetupError, match="inter is bytes a second, above 0"):
        Cluster("h100", inter=0)
    with pytest.raises(dmuon.SetupError, match="mesh is a number of ranks or"):
        dmuon.plan(meta(1), (1, 0), Workload(tokens=1))
    with pytest.raises(dmuon.SetupError, match="tokens is a whole number of 1 or more"):
        Workload(tokens=0)
    mixed = meta(1)
    mixed.lm_head.bfloat16()
    with pytest.raises(dmuon.SetupError, match=r"a plan knows one dtype"):
        dmuon.plan(mixed, 2, Workload(tokens=1))
