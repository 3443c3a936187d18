"""Blocks that travel whole: the same training, and the same choice everywhere."""

import math
from typing import Any

import pytest
import torch
from exact import assert_identical
from ranks_runner import run_ranks
from tiny import FormulaMuon, build, loss_of, tokens
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from trainees import BFLOAT16, POLAR_EXPRESS
from wrapped import backward, make_mesh, prepare, train

import dmuon
from dmuon import dedication
from dmuon.packing import Packing


def packings(model: nn.Module) -> list[str]:
    return [block.carrier.packing for block in dedication.of(model).engine.blocks]


class Recomputed(nn.Module):
    """The tiny model, whose layers are computed again in the backward."""

    def __init__(self, is_reentrant: bool | None) -> None:
        super().__init__()
        self.inner, self.is_reentrant = build(), is_reentrant

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x = self.inner.embed(tokens_BT)
        for layer in self.inner.layers:
            if self.is_reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.is_reentrant)
        return self.inner.head(self.inner.norm(x))


def run(shape: tuple[int, ...], packing: Packing, options: dict[str, Any]) -> list[Any]:
    """Losses and state of some steps; by block, also those after a resume from what was saved."""
    policy, reshard = options.get("policy", MixedPrecisionPolicy()), options.get("reshard", True)
    mesh = make_mesh(*shape)

    def start() -> tuple[nn.Module, dmuon.Muon]:
        model = Recomputed(options.get("is_reentrant"))
        dmuon.dedicate_params(
            model,
            mesh,
            lambda name, param: "proj.weight" in name,
            mp_policy=policy,
            reshard_after_forward=reshard,
            packing=packing,
        )
        for layer in model.inner.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model, dmuon.Muon(model, ns_dtype=torch.float32)

    def saved(model: nn.Module, optimizer: dmuon.Muon) -> list[Any]:
        state = dmuon.get_model_state_dict(model)
        return [dict(state), dmuon.get_optimizer_state_dict(model, optimizer)]

    model, optimizer = start()
    losses = train(model, optimizer, range(2))
    middle = saved(model, optimizer)
    losses += train(model, optimizer, range(2, 4))
    end = saved(model, optimizer)
    assert set(packings(model)) == {packing}
    if packing == "block":
        model, optimizer = start()
        dmuon.set_model_state_dict(model, middle[0])
        dmuon.set_optimizer_state_dict(model, optimizer, middle[1])
        assert losses[2:] == train(model, optimizer, range(2, 4))
        assert_identical(saved(model, optimizer), end)
    return [losses, *end]


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["2", "2x2"])
def test_the_choice_changes_no_bit_where_two_ranks_share_a_row(shape: tuple[int, ...]) -> None:
    """For a + b is b + a. Both precisions, both kinds of checkpointing, and resumed."""
    settings: list[dict[str, Any]] = [
        {},
        {"policy": BFLOAT16, "reshard": False},
        {"policy": BFLOAT16, "is_reentrant": True},
        {"is_reentrant": False},
    ]

    def body(rank: int) -> None:
        for options in settings:
            assert_identical(run(shape, "block", options), run(shape, "owner", options))

    run_ranks(math.prod(shape), body)


@pytest.mark.parametrize("shape", [(3,), (4,), (1, 4)], ids=["3", "4", "1x4"])
def test_blocks_of_one_matrix_whose_slots_are_mostly_empty(shape: tuple[int, ...]) -> None:
    def is_up(name: str, param: nn.Parameter) -> bool:
        return "up_proj" in name

    start = build().state_dict()
    alone = build().double()
    formula = FormulaMuon(alone, is_muon=is_up, coefficients=POLAR_EXPRESS, dtype=torch.float64)
    for step in range(2):
        loss_of(alone, tokens(step)).backward()
        formula.step()

    def body(rank: int) -> None:
        mesh, model = make_mesh(*shape), build()
        dmuon.dedicate_params(model, mesh, is_up, packing="block")
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train(model, dmuon.Muon(model, ns_dtype=torch.float32), range(2))
        counters = dmuon.get_counters(model)
        assert counters.collectives["reduce_scatter"] == 2 * 3
        assert not counters.collectives["broadcast"]
        state = dmuon.get_model_state_dict(model)
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name].double(), value, rtol=0, atol=2e-5, msg=name)
        assert any(not torch.equal(state[name], start[name]) for name in start)

    run_ranks(math.prod(shape), body)


def test_nothing_of_others_stays_between_uses_nor_in_gradients() -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(2, 2), packing="block")
        optimizer = dmuon.Muon(model)
        blocks = dedication.of(model).engine.blocks
        backward(model, 0)
        dmuon.clip_grad_norm_(model, math.inf)
        assert all(block.is_resharded for block in blocks)
        for block in blocks:
            for parcel in block.parcels:
                wire = parcel._wire
                assert wire is None or parcel.route.is_source == bool(wire.untyped_storage().size())
                shown = [param.param for param in parcel.params]
                assert parcel.route.is_source != any(bool(p.isnan().any()) for p in shown)
        optimizer.step()

    run_ranks(4, body)


def test_matrices_of_two_dtypes_in_one_block_go_by_owner() -> None:
    def body(rank: int) -> None:
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        model[1].bfloat16()
        whole = lambda name, module: not name  # noqa: E731
        dmuon.dedicate_params(model, make_mesh(2), hook_boundary_predicate=whole, packing="block")
        assert packings(model) == ["owner"]
        text = dmuon.describe(model)
        assert "0 of 1 blocks travel whole (packing='block')" in text.splitlines()

    run_ranks(2, body)


def test_ranks_that_ask_for_different_things_are_told() -> None:
    def body(rank: int) -> None:
        with pytest.raises(dmuon.SetupError, match=r"packing=block.*instead of .*packing=owner"):
            prepare(make_mesh(2), packing=("owner", "block")[rank])
        with pytest.raises(dmuon.SetupError, match="packing is one of auto, owner, block; got 'b'"):
            prepare(make_mesh(2), packing="b")  # type: ignore[arg-type]

    run_ranks(2, body)
