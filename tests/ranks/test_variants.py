"""Variants of models and precision that people train, against one process."""

import copy

import pytest
import torch
import torch.nn.functional as F
from ranks_runner import run_ranks
from tiny import FormulaMuon, build, is_proj, loss_of, share, tokens
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from wrapped import backward, make_mesh, train

import dmuon

POLAR_EXPRESS = list(dmuon.POLAR_EXPRESS_COEFFICIENTS[:5])


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_mixed_precision_follows_float32_within_bfloat16(shape: tuple[int, ...]) -> None:
    def body(rank: int) -> None:
        mesh = make_mesh(*shape)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = build()
        dmuon.dedicate_params(model, mesh, predicate=is_proj, mp_policy=policy)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = dmuon.Muon(model)
        losses = train(model, optimizer, range(6))
        state = dmuon.get_model_state_dict(model)
        assert all(value.dtype == torch.float32 for value in state.values())

        alone = build()
        formula = FormulaMuon(alone, coefficients=POLAR_EXPRESS)
        for step in range(6):
            loss = loss_of(alone, tokens(step))
            loss.backward()
            formula.step()
            assert abs(losses[step] - float(loss)) < 0.05
        # the master moves by less than bfloat16 can tell, and keeps it
        assert any((v != v.bfloat16().float()).any() for n, v in state.items() if "proj" in n)

    run_ranks(int(torch.tensor(shape).prod()), body)


def test_frozen_matrices_stay_and_the_others_follow_the_formula() -> None:
    frozen = ("layers.0.up_proj.weight", "layers.1.q_proj.weight", "layers.2.down_proj.weight")

    def freeze(model: nn.Module) -> nn.Module:
        for name, param in model.named_parameters():
            param.requires_grad_(name not in frozen)
        return model

    def body(rank: int) -> None:
        mesh = make_mesh(2)
        model = freeze(build())
        dmuon.dedicate_params(model, mesh, predicate=is_proj)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        train(model, optimizer, range(3))
        alone = freeze(build())
        formula = FormulaMuon(alone, coefficients=POLAR_EXPRESS)
        for step in range(3):
            loss_of(alone, tokens(step)).backward()
            formula.step()
        state = dmuon.get_model_state_dict(model)
        start = build().state_dict()
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=2e-5, msg=name)
            assert torch.equal(state[name], start[name]) == (name in frozen), name

    run_ranks(2, body)


def test_compiled_blocks_equal_one_process() -> None:
    def body(rank: int) -> None:
        mesh = make_mesh(2)
        model = build()
        dmuon.dedicate_params(model, mesh, predicate=is_proj)
        for index, layer in enumerate(model.layers):
            model.layers[index] = torch.compile(layer, backend="aot_eager")
            fully_shard(model.layers[index], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        train(model, optimizer, range(3))
        state = dmuon.get_model_state_dict(model)
        alone = build()
        formula = FormulaMuon(alone, coefficients=POLAR_EXPRESS)
        for step in range(3):
            loss_of(alone, tokens(step)).backward()
            formula.step()
        assert list(state) == list(alone.state_dict())
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=2e-5, msg=name)

    run_ranks(2, body, timeout_s=120)


class Plain(nn.Module):
    """No layer list at all, a matrix used by its parent, one used twice, one of a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.shared = nn.Linear(7, 7, bias=False)
        self.column = nn.Linear(1, 7, bias=False)
        self.attention = nn.MultiheadAttention(7, 1, batch_first=True)
        self.last = nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(F.relu(self.shared(self.first(x))))
        x = x + self.column(x.mean(-1, keepdim=True))
        return self.last(self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("shape", [(1,), (3,), (4,), (2, 2)], ids=str)
def test_a_model_without_layers_equals_one_process(shape: tuple[int, ...]) -> None:
    def body(rank: int) -> None:
        mesh = make_mesh(*shape)
        torch.manual_seed(0)
        alone = Plain()
        model = copy.deepcopy(alone)
        dmuon.dedicate_params(model, mesh, predicate=lambda n, p: p.ndim == 2)
        fully_shard(model, mesh=mesh)
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        formula = FormulaMuon(alone, is_muon=lambda n, p: p.ndim == 2, coefficients=POLAR_EXPRESS)
        world_size = int(torch.tensor(shape).prod())
        generator = torch.Generator().manual_seed(5)
        for _ in range(4):
            x = torch.randn(12, 3, 5, generator=generator)
            model(share(x, rank, world_size)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            alone(x).square().mean().backward()
            formula.step()
        state = dmuon.get_model_state_dict(model)
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-4, msg=name)

    run_ranks(int(torch.tensor(shape).prod()), body)


def test_a_model_from_the_meta_device_is_loaded_and_trained() -> None:
    def body(rank: int) -> None:
        mesh = make_mesh(2)
        with torch.device("meta"):
            model = build()
        dmuon.dedicate_params(model, mesh, predicate=is_proj)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with pytest.raises(dmuon.SetupError, match="meta device"):
            dmuon.Muon(model)
        model = None  # type: ignore[assignment]
        with torch.device("meta"):
            model = build()
        dmuon.dedicate_params(model, mesh, predicate=is_proj)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        dmuon.set_model_state_dict(model, build().state_dict())
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        backward(model, 0)
        optimizer.step()
        alone = build()
        formula = FormulaMuon(alone, coefficients=POLAR_EXPRESS)
        loss_of(alone, tokens(0)).backward()
        formula.step()
        state = dmuon.get_model_state_dict(model)
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=2e-5, msg=name)

    run_ranks(2, body)
