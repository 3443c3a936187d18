"""Ranks that disagree, or fail, or hang: one clear error everywhere, and no weights changed."""

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks_runner import run_ranks
from tiny import build, is_proj, loss_of, tokens
from torch import nn
from wrapped import backward, make_mesh, prepare

import dmuon
from dmuon.call_order import Call, CallOrder

SHORT = timedelta(seconds=3)  # in which a rank gives up on one that is not coming
Act = Callable[[nn.Module, dmuon.Muon], object]


def evaluate(model: nn.Module, optimizer: dmuon.Muon) -> None:
    with torch.no_grad():
        loss_of(model, tokens(9))


def forward(model: nn.Module, optimizer: dmuon.Muon) -> None:
    loss_of(model, tokens(9))


def train(model: nn.Module, optimizer: dmuon.Muon) -> None:
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()


def get_state(model: nn.Module, optimizer: dmuon.Muon) -> None:
    dmuon.get_model_state_dict(model)


def get_optimizer_state(model: nn.Module, optimizer: dmuon.Muon) -> None:
    dmuon.get_optimizer_state_dict(model, optimizer)


def clip(model: nn.Module, optimizer: dmuon.Muon) -> None:
    dmuon.clip_grad_norm_(optimizer, 1.0)


def skip_a_batch(model: nn.Module, optimizer: dmuon.Muon) -> None:
    forward(model, optimizer)
    train(model, optimizer)


def without_sync(model: nn.Module, optimizer: dmuon.Muon) -> None:
    with dmuon.no_sync(model):
        backward(model, 0)
    optimizer.zero_grad()


def again_and_again(act: Act, model: nn.Module, optimizer: dmuon.Muon) -> None:
    for _ in range(4):
        act(model, optimizer)


@pytest.mark.parametrize(
    ("first", "second", "shape"),
    [
        (train, evaluate, (2,)),
        (train, evaluate, (2, 1)),
        (train, get_state, (2, 1)),
        (evaluate, get_state, (2,)),
        (evaluate, forward, (2,)),
        (train, skip_a_batch, (2,)),
        (train, without_sync, (2, 1)),
        (get_state, get_optimizer_state, (2,)),
        (clip, evaluate, (2,)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "x".join(map(str, value)),
)
def test_ranks_that_disagree_all_get_an_error_that_says_so(
    first: Act, second: Act, shape: tuple[int, ...]
) -> None:
    def body(rank: int) -> None:
        model = prepare_on(shape)
        optimizer = dmuon.Muon(model)
        train(model, optimizer)
        with pytest.raises(dmuon.CollectiveError, match=r"another rank has|disagree") as info:
            again_and_again(second if rank else first, model, optimizer)
        told = [None, None]
        error = str(info.value)
        dist.all_gather_object(told, error)
        assert any("disagree" in text for text in told), told
        assert all("under `if rank == 0`" in text for text in told), told
        with pytest.raises(dmuon.CollectiveError):  # nothing goes on after that
            evaluate(model, optimizer)

    run_ranks(2, body, timeout_s=40)


def prepare_on(shape: tuple[int, ...]) -> nn.Module:
    """Dedicated parameters alone, so that no collective of FSDP2 comes before ours."""
    model = build()
    for name, param in model.named_parameters():
        param.requires_grad_(is_proj(name, param))
    dmuon.dedicate_params(model, make_mesh(*shape), predicate=is_proj, timeout=SHORT)
    return model


class Routed(nn.Module):
    """Uses one of its layers, chosen by the caller: as many collectives, of other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        return self.layers[way](x)


def test_blocks_in_another_order_are_told_with_the_calls_that_were_alike() -> None:
    def body(rank: int) -> None:
        order = CallOrder(dist.group.WORLD, dmuon.Counters())
        order.note_settings([0.02])  # as after a step
        order.note_collective(b"unshard", rank)
        order.begin(Call.BACKWARD)
        with pytest.raises(dmuon.CollectiveError, match=r"different orders.*Last calls: backward"):
            order.check()

    run_ranks(2, body)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_blocks_that_only_some_ranks_use_are_found_out_before_a_step_changes_weights(
    steps_before: int,
) -> None:
    def body(rank: int) -> None:
        model = Routed()
        chosen = lambda name, module: name.startswith("layers.")  # noqa: E731
        dmuon.dedicate_params(model, make_mesh(2), hook_boundary_predicate=chosen, timeout=SHORT)
        optimizer = dmuon.Muon(model)
        for _ in range(steps_before):  # all alike
            model(torch.ones(2, 6), 0).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        before = {n: p.detach().clone() for n, p in dmuon.get_owned_params(model).items()}

        def act() -> None:
            for _ in range(3):
                model(torch.ones(2, 6), 3 * rank).sum().backward()
                optimizer.step()

        with pytest.raises(dmuon.CollectiveError, match=r"another rank has|different orders"):
            act()
        for name, param in dmuon.get_owned_params(model).items():
            assert torch.equal(param, before[name]), name

    run_ranks(2, body, timeout_s=40)


def test_a_rank_that_raises_in_forward_takes_the_others_down_with_an_error() -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(3))
        optimizer = dmuon.Muon(model)
        train(model, optimizer)
        if rank == 1:

            def fail(*_: object) -> None:
                raise ValueError("broken on purpose")

            model.layers[1].register_forward_hook(fail)
        train(model, optimizer)

    with pytest.raises(AssertionError, match=r"rank 1 failed[\s\S]*broken on purpose"):
        run_ranks(3, body, timeout_s=40)


def test_a_rank_that_is_stuck_is_an_error_within_the_timeout_that_names_the_weights() -> None:
    def body(rank: int) -> None:
        model = prepare_on((2,))
        dmuon.Muon(model)
        dist.barrier()
        if rank == 0:
            with pytest.raises(
                dmuon.CollectiveError, match=r"weights of layers\.0 \(layers\.0\..* of owner "
            ):
                evaluate(model, None)
        dist.barrier()

    run_ranks(2, body, timeout_s=40)


def test_the_error_survives_a_pickle() -> None:
    import pickle

    for error in (dmuon.CollectiveError("why"), dmuon.NonFiniteGradientError(["a", "b"])):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))


def lower_rate(optimizer: dmuon.Muon, rank: int) -> float:
    optimizer.param_groups[0]["lr"] *= 0.5**rank
    return 1.0


def lower_limit(optimizer: dmuon.Muon, rank: int) -> float:
    return 0.5**rank


@pytest.mark.parametrize("differ", [lower_rate, lower_limit])
def test_ranks_that_step_with_different_settings_are_told(
    differ: Callable[[dmuon.Muon, int], float],
) -> None:
    """As after a schedule that follows the loss of each rank; owners would drift apart unseen."""

    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        optimizer = dmuon.Muon(model)

        def one_step(max_norm: float) -> None:
            backward(model, 0)
            dmuon.clip_grad_norm_(model, max_norm)
            optimizer.step()
            optimizer.zero_grad()

        for factor in (1.0, 0.9):
            for group in optimizer.param_groups:
                group["lr"] *= factor
            one_step(factor)

        def differing_step() -> None:
            one_step(differ(optimizer, rank))
            dmuon.get_model_state_dict(model)

        with pytest.raises(dmuon.CollectiveError, match=r"ranks 0, 1 .* different settings"):
            differing_step()

    run_ranks(2, body)
