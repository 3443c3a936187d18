"""Gradients that torch's own clipping scales without those of hidden matrices are told of."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from ranks_runner import run_ranks
from tiny import TinyModel, build, is_proj
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from wrapped import backward, make_mesh, wrap

import dmuon

ALONE = ()


def prepared(shape: tuple[int, ...], change: Callable[[TinyModel], object] = nn.Module.train):
    """A model and its optimizer; on one process without ``fully_shard`` for the shape `ALONE`."""
    model = build()
    change(model)
    if shape == ALONE:
        dmuon.dedicate_params(model, make_mesh(1), is_proj)
    else:
        wrap(model, make_mesh(*shape))
    return model, dmuon.Muon(model)


def clipped_by_torch(model: nn.Module, optimizer: dmuon.Muon) -> list[str]:
    """What is said in three steps."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(3):
            backward(model, step)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    said = [each for each in said if each.category is UserWarning]
    assert {each.filename for each in said} <= {__file__}, "the line is none of the script's"
    return [str(each.message) for each in said]


def expect_told(rank: int, said: list[str]) -> None:
    assert len(said) == (rank == 0), said
    for message in said:
        assert "of the parameters that FSDP2 shards were multiplied by 0." in message
        assert "those of the 18 hidden matrices live on their owners" in message
        assert "Call dmuon.clip_grad_norm_(optimizer, max_norm)" in message


@pytest.mark.parametrize("shape", [ALONE, (1,), (2,), (2, 2)], ids=str)
def test_clipping_by_torch_is_told_of_once(shape: tuple[int, ...]) -> None:
    def body(rank: int) -> None:
        expect_told(rank, clipped_by_torch(*prepared(shape)))

    run_ranks(int(torch.tensor(shape).prod()), body)


def test_it_is_noticed_where_fully_shard_has_one_module_and_our_clipping_follows() -> None:
    """The gradients of the outermost module come last, at the very end of backward."""

    def body(rank: int) -> None:
        model = build()
        dmuon.dedicate_params(model, mesh := make_mesh(2), is_proj)
        fully_shard(model, mesh=mesh)
        optimizer = dmuon.Muon(model)
        optimizer.register_step_pre_hook(lambda *_: dmuon.clip_grad_norm_(model, 0.1) and None)
        expect_told(rank, clipped_by_torch(model, optimizer))

    run_ranks(2, body)


class TwoSymmetric(nn.Module):
    """No norms and no biases; the first half of the tokens never occurs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
        self.hidden_proj = nn.Linear(16, 16, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden_proj(self.embedding(tokens)))


def test_rows_of_an_embedding_that_were_not_looked_up_hide_nothing() -> None:
    def body(rank: int) -> None:
        torch.manual_seed(0)
        model = TwoSymmetric()
        dmuon.dedicate_params(model, make_mesh(1), is_proj)
        optimizer = dmuon.Muon(model)
        tokens = torch.arange(32, 64)
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with pytest.warns(UserWarning, match="multiplied by"):
            optimizer.step()

    run_ranks(1, body)


def test_a_warning_that_is_an_error_comes_when_the_step_is_done_on_all_ranks() -> None:
    def body(rank: int) -> None:
        model, optimizer = prepared((2, 2))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "between backward and step")
            for step in range(3):
                backward(model, step)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                is_first = rank == 0 and step == 0
                with pytest.raises(UserWarning) if is_first else nullcontext():
                    optimizer.step()
                optimizer.zero_grad()
        assert optimizer.num_steps == 3

    run_ranks(4, body)


def clips(model: nn.Module, optimizer: dmuon.Muon) -> None:
    backward(model, 0)
    dmuon.clip_grad_norm_(model, 0.1)
    dmuon.clip_grad_norm_(optimizer, 0.01)


def accumulates(model: nn.Module, optimizer: dmuon.Muon) -> None:
    for step in range(3):
        backward(model, step)
    optimizer.step()
    backward(model, 0)  # one batch again: twice its gradient and more
    backward(model, 0)


def accumulates_locally(model: nn.Module, optimizer: dmuon.Muon) -> None:
    with dmuon.no_sync(model):
        backward(model, 0)
        backward(model, 0)
    backward(model, 0)


def clips_between(model: nn.Module, optimizer: dmuon.Muon) -> None:
    backward(model, 0)
    dmuon.clip_grad_norm_(optimizer, 0.1)
    backward(model, 0)


def zeroes(model: nn.Module, optimizer: dmuon.Muon) -> None:
    for by in (model, optimizer):
        backward(model, 0)
        by.zero_grad(set_to_none=False)
        optimizer.step()
    backward(model, 0)


def masks_rows(model: nn.Module, optimizer: dmuon.Muon) -> None:
    backward(model, 0)
    for module in (model.embed, model.head):
        grad = module.weight.grad
        getattr(grad, "_local_tensor", grad)[:4] = 0


def scales_the_embedding(model: nn.Module, optimizer: dmuon.Muon) -> None:
    backward(model, 0)
    model.embed.weight.grad.mul_(0.5)
    model.head.weight.grad.mul_(0.5)


def steps_twice(model: nn.Module, optimizer: dmuon.Muon) -> None:
    backward(model, 0)
    optimizer.step()


WAYS = [
    *(clips, accumulates, accumulates_locally, clips_between),
    *(zeroes, masks_rows, scales_the_embedding, steps_twice),
]


def freeze_norms(model: TinyModel) -> None:
    for layer in model.layers:
        for norm in (layer.norm1, layer.norm2):
            norm.requires_grad_(False)


def recompute(model: TinyModel, reentrant: bool) -> None:
    for layer in model.layers:
        plain = layer.forward
        layer.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=reentrant)


def compile_layers(model: TinyModel) -> None:
    for layer in model.layers:
        layer.compile(backend="aot_eager")


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        (ALONE, nn.Module.train),
        (ALONE, compile_layers),
        ((2,), nn.Module.train),
        ((2,), freeze_norms),
        ((2,), lambda model: recompute(model, True)),
        ((2,), lambda model: recompute(model, False)),
        ((2, 2), nn.Module.train),
    ],
    ids=["alone", "compiled", "shards", "frozen", "reentrant", "recomputed", "replicas"],
)
def test_nothing_is_said_of_what_is_right(
    shape: tuple[int, ...], change: Callable[[TinyModel], object]
) -> None:
    def body(rank: int) -> None:
        model, optimizer = prepared(shape, change)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "between backward and step")
            for way in WAYS:
                way(model, optimizer)
                optimizer.step()
                optimizer.zero_grad()
        expect_told(rank, clipped_by_torch(model, optimizer))  # so it was awake

    run_ranks(int(torch.tensor(shape).prod()), body)


def test_nothing_is_said_where_hidden_matrices_are_not_trained() -> None:
    def body(rank: int) -> None:
        model, optimizer = prepared((2,))
        for param in dmuon.get_dedicated_params(model).values():
            param.requires_grad_(False)
        assert not clipped_by_torch(model, optimizer)

    run_ranks(2, body)
