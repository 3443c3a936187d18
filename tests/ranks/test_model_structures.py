"""What blocks return, keep and share, against one process."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from block_net import WIDTH, Block, Net, layers_of, loss, text
from one_process import Batch, Training, assert_equals_one_process
from ranks_runner import run_ranks
from torch import nn

import dmuon

SHAPES = pytest.mark.parametrize(("shape", "reshard"), [((2,), True), ((2, 2), False)], ids=str)


class Pair(NamedTuple):
    hidden: torch.Tensor
    extra: Any


@dataclass
class Held:
    hidden: torch.Tensor
    extra: Any = None


class Nested(Block):
    """A tensor deep inside, another that is not used, and things that are no tensors."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return {"deep": [None, Pair({"y": (y,)}, "text")], "unused": y.detach(), "count": 3}


class InNamedTuple(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return Pair(super().forward(x), None)


class InDataclass(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return Held(super().forward(x))


class TwoOutputs(Block):
    """Two results that both reach the loss, one through a matrix alone."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.down(self.up(x))


class NetOfNested(Net):
    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x)["deep"][1].hidden["y"][0]


class NetOfHidden(Net):
    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x).hidden


class NetOfTwo(Net):
    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first, second = layer(x)
        return first + 0.1 * second


@SHAPES
@pytest.mark.parametrize(
    ("net", "block"),
    [
        (NetOfNested, Nested),
        (NetOfHidden, InNamedTuple),
        (NetOfHidden, InDataclass),
        (NetOfTwo, TwoOutputs),
    ],
)
def test_tensors_are_found_in_what_blocks_return(
    net: type[Net], block: type[Block], shape: tuple[int, ...], reshard: bool
) -> None:
    training = Training(lambda: net(block), text, layers_of, loss)
    assert_equals_one_process(training, shape, reshard)


class InPlace(Net):
    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        y.mul_(1.5)
        y[..., 0].add_(1.0)
        return F.relu_(y)


@SHAPES
def test_outputs_may_be_changed_in_place(shape: tuple[int, ...], reshard: bool) -> None:
    assert_equals_one_process(Training(InPlace, text, layers_of, loss), shape, reshard)


class View(nn.Module):
    """Returns a view, and holds nothing of which ``fully_shard`` has to take care."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 20, bias=False)
        self.down = nn.Linear(20, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))[...]


class AddsInPlace(Net):
    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        y += x
        return y


@SHAPES
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # it warns that its own hook is lost
def test_views_may_be_changed_in_place(shape: tuple[int, ...], reshard: bool) -> None:
    training = Training(lambda: AddsInPlace(View), text, layers_of, loss)
    assert_equals_one_process(training, shape, reshard)


class KeepsALoss(Block):
    """A loss on the side: backward reaches the matrices through it before the block's output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.side_loss = self.down(torch.tanh(self.up(x))).square().mean()
        return y


def loss_with_side_losses(model: Any, given: Batch) -> torch.Tensor:
    main = loss(model, given)
    return main + sum(layer.side_loss for layer in model.layers)


@SHAPES
def test_a_loss_that_a_block_keeps_on_itself(shape: tuple[int, ...], reshard: bool) -> None:
    training = Training(lambda: Net(KeepsALoss), text, layers_of, loss_with_side_losses)
    assert_equals_one_process(training, shape, reshard)


# Sharing --------------------------------------------------------------------------------------


def tied() -> nn.Module:
    return Net(tied=True)


class OneDown(Net):
    """All blocks use the first one's last matrix."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.down.weight = self.layers[0].down.weight


class OneLayer(Net):
    """One block under every name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layers[0]] * 3)


def different_layers(model: Any) -> Iterable[nn.Module]:
    return dict.fromkeys(model.layers)


@SHAPES
@pytest.mark.parametrize("make", [tied, OneDown])
def test_matrices_under_several_names(
    make: Callable[[], nn.Module], shape: tuple[int, ...], reshard: bool
) -> None:
    assert_equals_one_process(Training(make, text, different_layers, loss), shape, reshard)


@SHAPES
def test_one_block_under_several_names(shape: tuple[int, ...], reshard: bool) -> None:
    assert_equals_one_process(Training(OneLayer, text, different_layers, loss), shape, reshard)


def all_but_embed(name: str, param: nn.Parameter) -> bool:
    return param.ndim == 2 and "embed" not in name


def test_a_predicate_that_takes_one_name_of_a_tied_matrix_is_refused() -> None:
    def body(rank: int) -> None:
        with pytest.raises(dmuon.SetupError, match=r"head\.weight and embed\.weight are one tied"):
            Training(tied, text, layers_of, loss, predicate=all_but_embed).wrap((2,))

    run_ranks(2, body)


def only_the_first(name: str, param: nn.Parameter) -> bool:
    return name == "layers.0.up.weight"


@pytest.mark.parametrize("shape", [(3,), (4,), (2, 2)], ids=str)
def test_fewer_matrices_than_ranks(shape: tuple[int, ...]) -> None:
    training = Training(Net, text, layers_of, loss, predicate=only_the_first)
    assert_equals_one_process(training, shape)
