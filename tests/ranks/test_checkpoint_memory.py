"""What a save needs of each rank's memory: its share of the model, and a fixed buffer."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks_runner import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from wrapped import make_mesh

import dmuon
from dmuon.checkpoint.gathering import BUFFER_BYTES
from dmuon.checkpoint.saving import save_checkpoint

MB = 2**20
SLACK_BYTES = 16 * MB  # of the allocator, and of one chunk that is being written


class Large(nn.Module):
    """About 590 MB: 12 matrices of 16 MB, and four embeddings of 100 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(12800, 2048) for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(12))


def prepared(num_ranks: int) -> nn.Module:
    with torch.device("meta"):
        model = Large()
    model.to_empty(device="cpu")
    for number, param in enumerate(model.parameters()):
        nn.init.constant_(param, number)
    mesh = make_mesh(num_ranks)
    dmuon.dedicate_params(model, mesh, predicate=lambda name, _: "layers" in name)
    fully_shard(model, mesh=mesh)
    dmuon.get_counters(model)
    return model


def status(key: str) -> int:
    """In bytes, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def growth(do: Callable[[], object]) -> int:
    """By how many bytes the resident memory rises above what it was, at most, while ``do`` runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    do()
    return status("VmHWM") - before


def dump(model: nn.Module, path: Path) -> None:
    """What one does without this package."""
    torch.save(dmuon.get_model_state_dict(model, cpu_offload=True, rank0_only=True), path)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("beside", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_needs_its_share_and_a_fixed_buffer(
    num_ranks: int, beside: bool, tmp_path: Path
) -> None:
    def body(rank: int) -> None:
        model = prepared(num_ranks)
        save_checkpoint(tmp_path / "first", small(num_ranks))  # groups, threads, imports
        total = sum(param.numel() for param in large_params()) * 4
        needed = growth(lambda: save_checkpoint(tmp_path / "new", model, async_save=beside).wait())
        files = sorted((tmp_path / "new").glob("model-*.safetensors"))
        share = files[rank].stat().st_size
        simple = growth(lambda: dump(model, tmp_path / f"{rank}.pt"))
        print(
            f"rank {rank} of {num_ranks}: {needed / MB:.0f} MB for a share of {share / MB:.0f} of "
            f"{total / MB:.0f}; get_model_state_dict and torch.save {simple / MB:.0f} MB"
        )
        assert share < 1.15 * total / num_ranks
        assert needed < share + BUFFER_BYTES + SLACK_BYTES
        assert rank > 0 or needed < 0.7 * simple

    run_ranks(num_ranks, body)


def small(num_ranks: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8))
    dmuon.dedicate_params(model, make_mesh(num_ranks))
    return model


def large_params() -> list[torch.Tensor]:
    with torch.device("meta"):
        return list(Large().parameters())
