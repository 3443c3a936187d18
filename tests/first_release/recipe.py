"""What made the checkpoint beside this file, which must load for ever.

Everything it needs is in this file, so that no change elsewhere in the tests asks for another
checkpoint. It was run once, from the folder ``tests``::

    python -m first_release.recipe first_release

Do not run it again into this folder: a reader that fails on the files has lost old checkpoints.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon

FOLDER = Path(__file__).parent
CHECKPOINT = FOLDER / "checkpoint"
EXPECTED = FOLDER / "expected.json"
VOCAB, WIDTH, HIDDEN, BATCH, LENGTH = 29, 14, 22, 12, 6
NUM_STEPS, NUM_MORE_STEPS = 3, 2
EXTRA = {"tokens": 3 * BATCH * LENGTH, "best": float("inf"), "at": {7: (0.9, [None, True])}}
CONFIG = b'{"model_type": "first"}\n'
HALF = torch.bfloat16


class Layer(nn.Module):
    """A fused projection, a stack of experts, and a matrix in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate_up_proj = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH)
        self.experts_proj = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / WIDTH)
        self.half_proj = nn.Linear(WIDTH, WIDTH, bias=False, dtype=HALF)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(self.norm(x_BTD)).chunk(2, dim=-1)
        x_BTD = x_BTD + self.down_proj(F.silu(gate) * up)
        x_BTD = x_BTD + torch.einsum("btd,edf->btf", x_BTD, self.experts_proj)
        return x_BTD + self.half_proj(x_BTD.to(HALF)).float()


class Memory(nn.Module):
    """Keeps plain data, or a tensor, beside its parameters."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.frozen = nn.Parameter(ramp(5, 3), requires_grad=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.1)
        self.register_buffer("coarse", ramp(2, 3).to(torch.float16))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.plain = Memory({"calls": [1, 2], "pair": (3, 0.5, None), "dtype": HALF})
        self.tensor = Memory(torch.arange(5) ** 2)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens_BT) + self.frozen.mean()
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def ramp(*shape: int) -> torch.Tensor:
    """0, 1/8, 2/8, ... row by row: exact in every type of float."""
    return torch.arange(torch.Size(shape).numel()).view(shape) / 8


def forget(model: Model) -> None:
    """Change what a checkpoint brings back."""
    with torch.no_grad():
        for value in [*model.parameters(), *model.buffers()]:
            value.zero_()
    model.plain.kept = model.tensor.kept = None


def wrap(model: Model, mesh: DeviceMesh) -> Model:
    dmuon.dedicate_params(
        model,
        mesh,
        predicate=lambda name, _: "proj" in name and "bias" not in name,
        splits=lambda name, _: dmuon.Split(HIDDEN) if "gate_up" in name else None,
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def optimizer_of(model: Model) -> dmuon.Muon:
    groups = [{"params": ["layers.0.down_proj.weight"], "lr": 0.01, "momentum": 0.9}]
    return dmuon.Muon(model, ns_dtype=torch.float32, weight_decay=0.1, param_groups=groups)


def train(model: Model, optimizer: dmuon.Muon, steps: range) -> list[float]:
    """The global loss of each step. Collective."""
    losses = []
    for step in steps:
        every_row = torch.arange(BATCH * (LENGTH + 1)).view(BATCH, -1) * (step + 2) % VOCAB
        rows = every_row.chunk(dist.get_world_size())[dist.get_rank()]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


def facts_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Type, shape and SHA-256 of the values, in the byte order of nearly every machine."""
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return {
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(values).hexdigest(),
    }


def facts_of_state(model: Model, optimizer: dmuon.Muon) -> dict[str, Any]:
    """Of everything that state dicts hold, by path; plain values as they print. Collective."""
    state = dmuon.get_model_state_dict(model)
    found = {f"model/{name}": described(value) for name, value in state.items()}
    return found | facts_of_optimizer(dmuon.get_optimizer_state_dict(model, optimizer))


def facts_of_optimizer(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for section in ("fsdp2", "dedicated"):
        for name, values in state[section].items():
            found |= {f"{section}/{name}/{key}": described(v) for key, v in values.items()}
    return found | {key: described(state[key]) for key in ("param_groups", "num_steps")}


def described(value: Any) -> Any:
    return facts_of(value) if isinstance(value, torch.Tensor) else repr(value)


def write(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", rank=rank, world_size=4, init_method=f"file://{folder / 'store'}"
    )
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = wrap(Model(), mesh)
    optimizer = optimizer_of(model)
    losses = train(model, optimizer, range(NUM_STEPS))
    files = {"config.json": CONFIG}
    dmuon.save_checkpoint(folder / "checkpoint", model, optimizer, extra=EXTRA, files=files)
    state = facts_of_state(model, optimizer)
    losses += train(model, optimizer, range(NUM_STEPS, NUM_STEPS + NUM_MORE_STEPS))
    if rank == 0:
        text = json.dumps({"losses": losses, "state": state}, indent=1)
        (folder / "expected.json").write_text(text + "\n")
        (folder / "store").unlink()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.multiprocessing.spawn(write, (Path(sys.argv[1]).absolute(),), nprocs=4)
