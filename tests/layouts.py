"""A small model whose parameters hold many matrices, and where those are, written out by hand."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from tiny import SEQUENCE, VOCAB, WIDTH, FormulaMuon
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import dmuon

NUM_EXPERTS, HIDDEN, KEYS, HEAD = 5, 16, 8, 8


class Experts(nn.Module):
    """Stacked gated experts; the last one gets no token, and on a rank others may get none."""

    def __init__(self, num_chosen: int) -> None:
        super().__init__()
        self.num_chosen = num_chosen
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * HIDDEN, WIDTH) / 5)
        self.gate_up_bias = nn.Parameter(torch.zeros(NUM_EXPERTS, 2 * HIDDEN))
        self.down_proj = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, HIDDEN) / 5)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_ND = x_BTD.reshape(-1, WIDTH)
        scores_NE = self.router(x_ND)[:, : NUM_EXPERTS - 1].softmax(-1)
        weights_NK, chosen_NK = scores_NE.topk(self.num_chosen, -1)
        out_ND = torch.zeros_like(x_ND)
        for expert in range(NUM_EXPERTS):
            tokens, place = (chosen_NK == expert).nonzero(as_tuple=True)
            y = x_ND[tokens] @ self.gate_up_proj[expert].T + self.gate_up_bias[expert]
            gate, up = y.chunk(2, -1)
            y = (F.silu(gate) * up) @ self.down_proj[expert].T
            out_ND = out_ND.index_add(0, tokens, y * weights_NK[tokens, place, None])
        return out_ND.view_as(x_BTD)


class Attention(nn.Module):
    """Query, key and value fused, rows of ``(out, in)``; one key head serves all query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(WIDTH, WIDTH + 2 * KEYS, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, D = x_BTD.shape
        q, k, v = self.qkv_proj(x_BTD).split([WIDTH, KEYS, KEYS], -1)
        q = q.view(B, T, -1, HEAD).transpose(1, 2)
        k, v = (each.view(B, T, 1, HEAD).transpose(1, 2).expand_as(q) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, D))


class InOut(nn.Module):
    """Three projections fused as columns of ``(in, out)``, as GPT-2 stores them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) / 5)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        a, b, c = (x_BTD @ self.weight).chunk(3, -1)
        return a * b.sigmoid() + c.tanh()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.along = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.plain = nn.Conv2d(4, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 12, 3, padding=1, groups=2, bias=False)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False)
        self.back = nn.ConvTranspose2d(12, 4, 3, padding=1, groups=2, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        y = self.along(x_BTD.transpose(1, 2)).view(-1, 4, WIDTH // 4, SEQUENCE)
        y = self.back(self.depthwise(self.grouped(F.gelu(self.plain(y)))))
        return y.reshape(-1, WIDTH, SEQUENCE).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, num_chosen: int) -> None:
        super().__init__()
        parts = [Attention(), InOut(), Experts(num_chosen), Convolutions()]
        self.attention, self.in_out, self.experts, self.convolutions = parts
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.attention, self.in_out, self.experts, self.convolutions)
        for norm, part in zip(self.norms, parts, strict=True):
            x = x + part(norm(x))
        return x


class ManyLayouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(num_chosen) for num_chosen in (1, 2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens_BT)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build_many(seed: int = 0) -> ManyLayouts:
    torch.manual_seed(seed)
    return ManyLayouts()


def splits(name: str, param: nn.Parameter) -> dmuon.Split | None:
    table = {
        "qkv_proj.weight": dmuon.Split((WIDTH, KEYS, KEYS)),
        "o_proj.weight": dmuon.Split(HEAD, dim=1),
        "in_out.weight": dmuon.Split((WIDTH, WIDTH, WIDTH), dim=1),
        "gate_up_proj": dmuon.Split(HIDDEN),
    }
    return next((split for end, split in table.items() if name.endswith(end)), None)


Parts = Callable[[torch.Tensor], list[torch.Tensor]]

# one 2-D view a matrix, by the end of the name; nothing of dmuon decides this
BY_HAND: dict[str, Parts] = {
    "qkv_proj.weight": lambda w: [w[:WIDTH], w[WIDTH : WIDTH + KEYS], w[WIDTH + KEYS :]],
    "o_proj.weight": lambda w: [w[:, start : start + HEAD] for start in range(0, WIDTH, HEAD)],
    "in_out.weight": lambda w: [w[:, :WIDTH], w[:, WIDTH : 2 * WIDTH], w[:, 2 * WIDTH :]],
    "router.weight": lambda w: [w],
    "gate_up_proj": lambda w: [half for e in w for half in (e[:HIDDEN], e[HIDDEN:])],
    "down_proj": lambda w: list(w),
    "along.weight": lambda w: [w.view(WIDTH, WIDTH * 3)],
    "plain.weight": lambda w: [w.view(8, 4 * 9)],
    "grouped.weight": lambda w: [w[:6].view(6, 4 * 9), w[6:].view(6, 4 * 9)],
    "back.weight": lambda w: [w[:6].view(6, 2 * 9), w[6:].view(6, 2 * 9)],
}
NUM_MATRICES = 2 * (3 + 3 + 3 + 1 + 2 * NUM_EXPERTS + NUM_EXPERTS + 1 + 1 + 2 + 2)


class FormulaByHand(FormulaMuon):
    """The formula for the matrices of ``BY_HAND``."""

    def _matrices(self, name: str, W: nn.Parameter, values: torch.Tensor) -> list[torch.Tensor]:
        return next(cut for end, cut in BY_HAND.items() if name.endswith(end))(values)


def is_by_hand(name: str, param: nn.Parameter) -> bool:
    return name.endswith(tuple(BY_HAND))


def wrap_many(model: nn.Module, mesh: DeviceMesh) -> dmuon.Plan:
    plan = dmuon.dedicate_params(model, mesh, splits=splits)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plan
