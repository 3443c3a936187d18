"""Checkpoints and state dicts tell which projections were updated in parts."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_same
from first_release import recipe
from ranks_runner import run_ranks
from tiny import WIDTH, build, is_proj
from torch import nn
from torch.distributed.fsdp import fully_shard
from wrapped import make_mesh, train

import dmuon

UP = "layers.0.up_proj.weight"  # (50, WIDTH)
THIRD = dmuon.Split(WIDTH // 3, dim=1)
UNEQUAL = dmuon.Split((20, 30))


def prepared(split: dmuon.Split | None, seed: int = 0) -> tuple[nn.Module, dmuon.Muon]:
    model, mesh = build(seed), make_mesh(2)
    dmuon.dedicate_params(
        model, mesh, is_proj, splits=lambda name, _: split if name == UP else None
    )
    fully_shard(model, mesh=mesh)
    return model, dmuon.Muon(model, ns_dtype=torch.float32)


@contextmanager
def told(rank: int, says: str | None) -> Iterator[None]:
    """The first rank alone is warned, and only when there is something to say."""
    if rank == 0 and says is not None:
        with pytest.warns(UserWarning, match=says):
            yield
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            yield


@pytest.mark.parametrize(
    ("written", "read", "how"),
    [
        (UNEQUAL, UNEQUAL, None),
        (None, None, None),
        (UNEQUAL, None, "rows split in 20 + 30 there, whole here"),
        (None, THIRD, "whole there, columns split in 3 x 8 here"),
        (UNEQUAL, THIRD, "rows split in 20 + 30 there, columns split in 3 x 8 here"),
    ],
    ids=["same", "never", "no longer", "from now on", "otherwise"],
)
def test_other_splits_are_told_and_the_momentum_is_the_same(
    written: dmuon.Split | None, read: dmuon.Split | None, how: str | None, tmp_path: Path
) -> None:
    def body(rank: int) -> None:
        model, optimizer = prepared(written)
        train(model, optimizer, range(2))
        dmuon.save_checkpoint(tmp_path / "new", model, optimizer)
        weights = dmuon.get_model_state_dict(model)
        state = dmuon.get_optimizer_state_dict(model, optimizer)
        says = None if how is None else f"other splits.*{re.escape(f'{UP}: {how}')}"
        other, its_optimizer = prepared(read, seed=1)
        with told(rank, says):
            loaded = dmuon.load_checkpoint(tmp_path / "new", other, its_optimizer)
        assert loaded.other_splits == ({} if how is None else {UP: how})
        assert_equal(other, its_optimizer, weights, state)
        other, its_optimizer = prepared(read, seed=1)
        dmuon.set_model_state_dict(other, weights)
        with told(rank, says):  # also when only the first rank has it
            given = state if rank == 0 else {}
            dmuon.set_optimizer_state_dict(other, its_optimizer, given)
        assert_equal(other, its_optimizer, weights, state)
        same = train(model, optimizer, range(2, 5)) == train(other, its_optimizer, range(2, 5))
        assert same == (how is None), "the splits make no difference"

    def assert_equal(
        model: nn.Module, optimizer: dmuon.Muon, weights: dict[str, Any], state: dict[str, Any]
    ) -> None:
        found = dmuon.get_optimizer_state_dict(model, optimizer)
        assert_same(dmuon.get_model_state_dict(model), weights)
        assert_same(found | {"splits": None}, state | {"splits": None})

    run_ranks(2, body)


def test_torch_gets_no_state_of_what_it_would_update_otherwise(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = []

    def body(rank: int) -> None:
        model, optimizer = prepared(UNEQUAL)
        train(model, optimizer, range(1))
        dmuon.save_checkpoint(tmp_path / "new", model, optimizer)
        state = dmuon.get_optimizer_state_dict(model, optimizer)
        if rank == 0:
            torch.save(state, tmp_path / "state.pt")

    run_ranks(2, body)
    model = build()
    named = dict(model.named_parameters())
    muon = torch.optim.Muon([p for n, p in named.items() if is_proj(n, p)])
    adamw = torch.optim.AdamW([p for n, p in named.items() if not is_proj(n, p)])
    options = {"ns_coefficients": dmuon.CLASSIC_COEFFICIENTS}
    states.append(dmuon.read_optimizer_state(tmp_path / "new"))
    states.append(torch.load(tmp_path / "state.pt", weights_only=True))
    for state in states:
        with pytest.raises(dmuon.StateDictError, match=rf"{UP}: rows split.*delete it") as caught:
            dmuon.optimizer_state_to_torch(state, model, muon, adamw, **options)
        assert len(caught.value.problems) == 1
        del state["splits"][UP]
        dmuon.optimizer_state_to_torch(state, model, muon, adamw, **options)
    state["splits"] = [UP]
    with pytest.raises(dmuon.StateDictError, match="splits: is a list"):
        dmuon.optimizer_state_to_torch(state, model, muon, adamw, **options)


def test_torch_gets_no_stack_of_matrices() -> None:
    state = dmuon.read_optimizer_state(recipe.CHECKPOINT)
    model = recipe.Model()
    named = dict(model.named_parameters())
    flat = [n for n in state["dedicated"] if named[n].ndim == 2]
    muon = torch.optim.Muon([named[n] for n in flat])
    adamw = torch.optim.AdamW([p for n, p in named.items() if n not in flat])
    with pytest.raises(dmuon.StateDictError) as caught:
        dmuon.optimizer_state_to_torch(state, model, muon, adamw)
    match = "layers.0.experts_proj: several matrices in one parameter of shape [3, 14, 14]"
    assert any(match in problem for problem in caught.value.problems)


def test_a_difference_of_splits_is_one_of_settings(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        for number, split in enumerate((None, UNEQUAL)):
            model, optimizer = prepared(split)
            dmuon.save_checkpoint(tmp_path / str(number), model, optimizer)

    run_ranks(2, body)
    found = dmuon.diff_checkpoints(tmp_path / "0", tmp_path / "1")
    assert not found.values
    assert found.settings
    assert all("splits" in path and UP in path for path in found.settings)


def test_splits_that_are_none_are_refused_before_anything_changes() -> None:
    def body(rank: int) -> None:
        model, optimizer = prepared(None)
        state = dmuon.get_optimizer_state_dict(model, optimizer)
        for wrong in ([], {UP: {"sizes": [0], "dim": 0}}, {UP: 3}):
            with pytest.raises(dmuon.StateDictError, match="splits: "):
                dmuon.set_optimizer_state_dict(model, optimizer, state | {"splits": wrong})

    run_ranks(2, body)
