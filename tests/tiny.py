"""A small real model, its data, and the one-process answers that distributed runs must match."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH, HEADS, SEQUENCE, GLOBAL_BATCH = 37, 24, 3, 8, 12


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, D = x_BTD.shape
        y = self.norm1(x_BTD)
        q, k, v = (
            proj(y).view(B, T, HEADS, -1).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.o_proj(attended.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.down_proj(F.gelu(self.up_proj(self.norm2(x_BTD))))


class TinyModel(nn.Module):
    def __init__(self, num_layers: int = 3, hidden: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH, hidden) for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens_BT)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(seed: int = 0, num_layers: int = 3) -> TinyModel:
    torch.manual_seed(seed)
    return TinyModel(num_layers)


def is_proj(name: str, param: nn.Parameter) -> bool:
    return "proj" in name and param.ndim == 2


def tokens(step: int) -> torch.Tensor:
    """The global batch of one step: arithmetic sequences, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1000 + step)
    start = torch.randint(0, VOCAB, (GLOBAL_BATCH, 1), generator=generator)
    stride = torch.randint(1, 5, (GLOBAL_BATCH, 1), generator=generator)
    return (start + stride * torch.arange(SEQUENCE + 1)) % VOCAB


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.reshape(-1, VOCAB), rows[:, 1:].reshape(-1))


def share(rows: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    return rows.chunk(world_size)[rank]


class FormulaMuon:
    """Muon and AdamW written out from the formulas, in plain loops, for one process.

    Args:
        split: ``(name, param) -> (sizes, dim)``: the parts of each matrix of a fused projection.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        is_muon: Callable[[str, nn.Parameter], bool] = is_proj,
        split: Callable[[str, nn.Parameter], tuple[Sequence[int], int] | None] | None = None,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        coefficients: list[tuple[float, float, float]],
        adjust: str | None = "match_rms_adamw",
        adamw_lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.01,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.named = [(n, p, is_muon(n, p)) for n, p in model.named_parameters()]
        self.split = split or (lambda name, param: None)
        convolutions = [m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d)]
        self.groups_of = {convolution.weight: convolution.groups for convolution in convolutions}
        self.lr, self.momentum, self.nesterov, self.decay = lr, momentum, nesterov, weight_decay
        self.coefficients, self.adjust, self.dtype = coefficients, adjust, dtype
        self.adamw_lr, self.betas, self.adamw_eps = adamw_lr, betas, adamw_eps
        self.adamw_decay = adamw_weight_decay
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for name, param, is_muon in self.named:
            if param.grad is not None:
                (self._muon if is_muon else self._adamw)(name, param, param.grad)
                param.grad = None

    def _muon(self, name: str, W: nn.Parameter, grad: torch.Tensor) -> None:
        buf = self.state.setdefault(name, {"buf": torch.zeros_like(W)})["buf"]
        buf.copy_(self.momentum * buf + grad)
        u = grad + self.momentum * buf if self.nesterov else buf
        W.mul_(1 - self.lr * self.decay)
        for W_MN, u_MN in zip(self._matrices(name, W, W), self._matrices(name, W, u), strict=True):
            W_MN.sub_(self.lr * self._scale(*W_MN.shape) * self._orthogonal(u_MN))

    def _matrices(self, name: str, W: nn.Parameter, values: torch.Tensor) -> list[torch.Tensor]:
        """The matrices of a parameter shaped as ``W``: of each expert, of each group, each part."""
        if W in self.groups_of:
            matrices = list(values.view(self.groups_of[W], -1, W[0].numel()))
        else:
            matrices = [values] if W.ndim == 2 else list(values)
        split = self.split(name, W)
        if split is None:
            return matrices
        return [part for matrix in matrices for part in matrix.split(list(split[0]), split[1])]

    def _scale(self, m: int, n: int) -> float:
        return {
            "match_rms_adamw": 0.2 * math.sqrt(max(m, n)),
            "original": math.sqrt(max(1.0, m / n)),
            None: 1.0,
        }[self.adjust]

    def _orthogonal(self, u: torch.Tensor) -> torch.Tensor:
        X = u.to(self.dtype)
        tall = X.shape[0] > X.shape[1]
        X = X.T if tall else X
        X = X / max(float(X.norm()), 1e-7)
        for a, b, c in self.coefficients:
            A = X @ X.T
            X = a * X + b * (A @ X) + c * (A @ (A @ X))
        return (X.T if tall else X).to(u.dtype)

    def _adamw(self, name: str, p: nn.Parameter, grad: torch.Tensor) -> None:
        state = self.state.setdefault(name, {"m": torch.zeros_like(p), "v": torch.zeros_like(p)})
        beta1, beta2 = self.betas
        state["m"].mul_(beta1).add_(grad, alpha=1 - beta1)
        state["v"].mul_(beta2).add_(grad * grad, alpha=1 - beta2)
        m_hat = state["m"] / (1 - beta1**self.steps)
        v_hat = state["v"] / (1 - beta2**self.steps)
        p.mul_(1 - self.adamw_lr * self.adamw_decay)
        p.sub_(self.adamw_lr * m_hat / (v_hat.sqrt() + self.adamw_eps))
