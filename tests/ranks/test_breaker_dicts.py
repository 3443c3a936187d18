"""State dicts with values that are not plain: loaded exactly, or refused with nothing changed."""

from typing import Any

import pytest
import torch
from ranks_runner import run_ranks
from tiny import is_proj
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from wrapped import make_mesh, prepare, train

import dmuon


class Small(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, bias=False)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("kept", torch.zeros(3).to(dtype))
        self.register_buffer("number", torch.zeros(()).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.proj(x))


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=str)
def test_buffers_of_any_dtype_come_from_the_first_rank_alone(shape: tuple[int, ...]) -> None:
    dtypes = [torch.bool, torch.int16, torch.uint16, torch.int64, torch.float64, torch.complex64]

    def body(rank: int) -> None:
        for dtype in [*dtypes, torch.float8_e4m3fn, torch.float16]:
            model = Small(dtype)
            dmuon.dedicate_params(model, make_mesh(*shape), is_proj)
            state = dmuon.get_model_state_dict(model)
            state["kept"], state["number"] = torch.ones(3).to(dtype), torch.ones(()).to(dtype)
            dmuon.set_model_state_dict(model, state if rank == 0 else {})
            assert torch.equal(model.kept, state["kept"])
            assert torch.equal(model.number, state["number"])

    run_ranks(2, body)


MAKE_ODD: dict[str, Any] = {
    "meta": lambda value, mesh: value.to("meta"),
    "sharded": lambda value, mesh: distribute_tensor(value, mesh, [Shard(0)]),
    "sparse": lambda value, mesh: value.to_sparse(),
    "array": lambda value, mesh: value.numpy(),
}


@pytest.mark.parametrize("name", ["proj.weight", "norm.weight"])
@pytest.mark.parametrize("kind", list(MAKE_ODD))
def test_values_that_are_no_whole_tensors_are_refused_and_nothing_changes(
    kind: str, name: str
) -> None:
    def body(rank: int) -> None:
        model, mesh = Small(), make_mesh(2)
        dmuon.dedicate_params(model, mesh, is_proj)
        fully_shard(model, mesh=mesh)
        before = dmuon.get_model_state_dict(model)
        state: dict[str, Any] = {key: torch.full_like(v, 7) for key, v in before.items()}
        state[name] = MAKE_ODD[kind](state[name], mesh)
        with pytest.raises(dmuon.StateDictError, match=f"{name}: is .* needs a whole dense tensor"):
            dmuon.set_model_state_dict(model, state)
        after = dmuon.get_model_state_dict(model)
        assert all(torch.equal(after[key], before[key]) for key in before)

    run_ranks(2, body)


def test_what_is_no_dict_on_one_rank_is_an_error_on_every_rank() -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        optimizer = dmuon.Muon(model)
        for given in (None, [1], {"dedicated": 3}, {"fsdp2": {"norm.weight": 3}}):
            mine: Any = given if rank == 0 else {}
            with pytest.raises(dmuon.StateDictError, match=r"no dictionary|must be"):
                dmuon.set_optimizer_state_dict(model, optimizer, mine)
        with pytest.raises(dmuon.StateDictError, match="a NoneType is no dictionary"):
            dmuon.set_model_state_dict(model, None if rank == 0 else {})  # type: ignore[arg-type]

    run_ranks(2, body)


def test_state_of_the_other_kind_is_refused_and_momentum_stays() -> None:
    """AdamW moments for a matrix that Muon trains would otherwise be dropped with its momentum."""

    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        optimizer = dmuon.Muon(model)
        train(model, optimizer, range(1))
        before = dmuon.get_optimizer_state_dict(model, optimizer)["dedicated"]
        name, momentum = next(iter(before.items()))
        odd = {"exp_avg": momentum["momentum_buffer"]}
        meta = {"momentum_buffer": momentum["momentum_buffer"].to("meta")}
        for values, match in ((odd, "no such state"), (meta, "is on the meta device")):
            with pytest.raises(dmuon.StateDictError, match=match):
                dmuon.set_optimizer_state_dict(model, optimizer, {"dedicated": {name: values}})
        zeros = {"momentum_buffer": torch.zeros_like(momentum["momentum_buffer"])}
        with pytest.raises(dmuon.StateDictError, match=r"num_steps: is a str, needs a number"):
            dmuon.set_optimizer_state_dict(
                model, optimizer, {"dedicated": {name: zeros}, "num_steps": "7"}
            )
        after = dmuon.get_optimizer_state_dict(model, optimizer)["dedicated"]
        for key, values in before.items():
            assert torch.equal(after[key]["momentum_buffer"], values["momentum_buffer"])

    run_ranks(2, body)


def test_of_the_names_of_a_tied_matrix_the_last_one_counts_as_in_torch() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a_proj = nn.Linear(4, 4, bias=False)
            self.b_proj = nn.Linear(4, 4, bias=False)
            self.b_proj.weight = self.a_proj.weight

    def body(rank: int) -> None:
        model, alone = Tied(), Tied()
        dmuon.dedicate_params(model, make_mesh(2), is_proj)
        state = {"b_proj.weight": torch.full((4, 4), 2.0), "a_proj.weight": torch.ones(4, 4)}
        alone.load_state_dict(state)
        dmuon.set_model_state_dict(model, state)
        loaded = dmuon.get_model_state_dict(model)
        assert torch.equal(loaded["a_proj.weight"], alone.a_proj.weight)

    run_ranks(2, body)
