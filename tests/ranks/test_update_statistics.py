"""What ``watch_updates`` tells of every matrix, against singular values in float64 of one process.

Beside it that nobody notices: no bit of the training and no collective depends on it.
"""

import math

import pytest
import torch
import torch.distributed as dist
from layouts import NUM_MATRICES, FormulaByHand, build_many, is_by_hand, wrap_many
from ranks_runner import run_ranks
from tiny import loss_of, tokens
from torch import nn
from wrapped import backward, make_mesh, train

import dmuon

STEPS = 3
ENDINGS = {  # of the names of the matrices, in the order of `layouts.BY_HAND`
    "qkv_proj.weight": [":0", ":1", ":2"],
    "o_proj.weight": [":0", ":1", ":2"],
    "in_out.weight": [":0", ":1", ":2"],
    "router.weight": [""],
    "gate_up_proj": [f"[{expert}]:{half}" for expert in range(5) for half in range(2)],
    "down_proj": [f"[{expert}]" for expert in range(5)],
    "along.weight": [""],
    "plain.weight": [""],
    "grouped.weight": ["[0]", "[1]"],
    "back.weight": ["[0]", "[1]"],
}


class Spectra(FormulaByHand):
    """The formula in float64, which keeps what is known of each matrix of the last step."""

    def __init__(self, model: nn.Module) -> None:
        coefficients = list(dmuon.POLAR_EXPRESS_COEFFICIENTS[:5])
        super().__init__(model, is_muon=is_by_hand, coefficients=coefficients, dtype=torch.float64)
        self.expected: dict[str, tuple[float, ...]] = {}

    def _muon(self, name: str, W: nn.Parameter, grad: torch.Tensor) -> None:
        before = [each.clone() for each in self._matrices(name, W, W)]
        self.updates: list[torch.Tensor] = []
        super()._muon(name, W, grad)
        endings = next(endings for end, endings in ENDINGS.items() if name.endswith(end))
        for ending, w, U in zip(endings, before, self.updates, strict=True):
            sigma = torch.linalg.svdvals(U)
            self.expected[name + ending] = (
                float(sigma.max()),
                float((sigma**2 - 1).square().mean().sqrt()),
                self.lr * self._scale(*U.shape) * float(U.square().mean().sqrt()),
                float(w.square().mean().sqrt()),
            )

    def _orthogonal(self, u: torch.Tensor) -> torch.Tensor:
        self.updates.append(super()._orthogonal(u))
        return self.updates[-1]


def expected() -> dict[str, tuple[float, ...]]:
    alone = build_many().double()
    formula = Spectra(alone)
    for step in range(STEPS):
        loss_of(alone, tokens(step)).backward()
        formula.step()
    return formula.expected


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=lambda s: "x".join(map(str, s)))
def test_every_matrix_is_told_once_and_its_numbers_are_those_of_float64(shape) -> None:
    def body(rank: int) -> None:
        model = build_many()
        plan = wrap_many(model, make_mesh(*shape))
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        train(model, optimizer, range(STEPS - 1))
        backward(model, STEPS - 1)
        with dmuon.watch_updates(optimizer) as mine:
            optimizer.step()
        assert len(mine) == plan.num_matrices_per_owner[rank]
        ranks: list[dict[str, dmuon.UpdateStatistics]] = [{}] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        told = {name: each for some in ranks for name, each in some.items()}
        assert sum(map(len, ranks)) == len(told) == NUM_MATRICES
        for name, numbers in expected().items():
            seen = told.pop(name)
            found = seen.spectral_norm, seen.orthogonality_error, seen.update_rms, seen.weight_rms
            assert found == pytest.approx(numbers, rel=2e-3, abs=1e-5), name
            assert seen.update_to_weight == pytest.approx(numbers[2] / numbers[3], rel=2e-3)
            if name.endswith("down_proj[4]") and name.startswith("layers.0"):
                assert found[:3] == (0, 1, 0)  # the expert without tokens
        assert told == {}

    run_ranks(math.prod(shape), body)


def test_training_has_the_same_bits_and_collectives_with_and_without() -> None:
    def trained(is_watched: bool):
        model = build_many()
        wrap_many(model, make_mesh(2, 2))
        optimizer = dmuon.Muon(model)
        before = torch.get_rng_state()
        for step in range(STEPS):
            backward(model, step)
            if is_watched:
                with dmuon.watch_updates(optimizer) as mine:
                    optimizer.step()
                assert mine
            else:
                optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(torch.get_rng_state(), before)
        counters = dict(dmuon.get_counters(model).collectives)
        state = dmuon.get_optimizer_state_dict(model, optimizer)
        return dmuon.get_model_state_dict(model), state["dedicated"], counters

    def body(rank: int) -> None:
        plain, watched = trained(False), trained(True)
        torch.testing.assert_close(watched, plain, rtol=0, atol=0)

    run_ranks(4, body)


def test_a_matrix_without_gradient_is_not_told_and_a_second_watch_is_refused() -> None:
    def body(rank: int) -> None:
        model = build_many()
        wrap_many(model, make_mesh(2))
        optimizer = dmuon.Muon(model)
        with dmuon.watch_updates(optimizer) as mine:
            optimizer.step()
        assert mine == {}
        with pytest.raises(RuntimeError, match="mine"), dmuon.watch_updates(optimizer):
            raise RuntimeError("mine")  # the watch ends all the same
        with (
            dmuon.watch_updates(optimizer),
            pytest.raises(dmuon.SetupError, match="watched already"),
            dmuon.watch_updates(optimizer),
        ):
            pass
        with (
            pytest.raises(dmuon.SetupError, match="not SGD"),
            dmuon.watch_updates(torch.optim.SGD(model.parameters())),
        ):
            pass

    run_ranks(2, body)
