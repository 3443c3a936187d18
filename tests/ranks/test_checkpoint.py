"""Checkpoints: written in parallel, read on any mesh, never half."""

from pathlib import Path

import torch
import torch.distributed as dist
from checkpoints import assert_same, states
from ranks_runner import run_ranks
from tiny import build
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from wrapped import make_mesh, prepare, train, wrap

import dmuon
from dmuon.checkpoint import gathering

MESHES = [(1,), (2,), (3,), (4,), (2, 2), (4, 1)]


def size_of(shape: tuple[int, ...]) -> int:
    return int(torch.tensor(shape).prod())


def name_of(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def prepare_one_layer(mesh: DeviceMesh, seed: int = 0) -> nn.Module:
    return wrap(build(seed, num_layers=1), mesh)


def write(written_on: tuple[int, ...], folder: Path) -> None:
    """Some steps, a checkpoint, what state dicts say then, and more steps. Collective."""
    name = name_of(written_on)
    model = prepare_one_layer(make_mesh(*written_on))
    optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
    train(model, optimizer, range(3))
    dmuon.save_checkpoint(folder / name, model, optimizer, extra={"where": name})
    states = (dmuon.get_model_state_dict(model), dmuon.get_optimizer_state_dict(model, optimizer))
    losses = train(model, optimizer, range(3, 5))
    after = dmuon.get_model_state_dict(model)
    if dist.get_rank() == 0:
        torch.save((states, losses, after), folder / f"{name}.pt")


def read(read_on: tuple[int, ...], written_on: tuple[int, ...], folder: Path) -> None:
    """Load, compare, save again and load that, and go on. Collective."""
    name = name_of(written_on)
    (model_state, optimizer_state), losses, after = torch.load(folder / f"{name}.pt")
    mesh = make_mesh(*read_on)
    source = folder / name
    for again in (False, True):
        model = prepare_one_layer(mesh, seed=1)
        optimizer = dmuon.Muon(model, lr=0.5, ns_dtype=torch.float32)
        loaded = dmuon.load_checkpoint(source, model, optimizer)
        assert (loaded.step, loaded.extra) == (3, {} if again else {"where": name})
        assert_same(dmuon.get_model_state_dict(model), model_state)
        assert_same(dmuon.get_optimizer_state_dict(model, optimizer), optimizer_state)
        if not again:
            source = folder / f"{name} on {name_of(read_on)}"
            dmuon.save_checkpoint(source, model, optimizer)
    gone_on = train(model, optimizer, range(3, 5))
    torch.testing.assert_close(torch.tensor(gone_on), torch.tensor(losses), rtol=0, atol=1e-4)
    if read_on == written_on:
        assert gone_on == losses
        assert_same(dmuon.get_model_state_dict(model), after)


def test_any_mesh_loads_what_any_mesh_wrote_and_goes_on_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    for size in (1, 2, 3, 4):
        meshes = [shape for shape in MESHES if size_of(shape) == size]
        run_ranks(size, lambda rank, meshes=meshes: [write(each, tmp_path) for each in meshes])
    for size in (1, 2, 3, 4):
        pairs = [(on, of) for on in MESHES if size_of(on) == size for of in MESHES]
        run_ranks(size, lambda rank, pairs=pairs: [read(*each, tmp_path) for each in pairs])


def test_the_weights_load_strictly_into_the_plain_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    def body(rank: int) -> None:
        model = prepare(make_mesh(3))
        optimizer = dmuon.Muon(model)
        train(model, optimizer, range(1))
        handle = dmuon.save_checkpoint(tmp_path / "new", model, optimizer, async_save=True)
        expected = dmuon.get_model_state_dict(model)
        train(model, optimizer, range(1, 3))
        manifest = handle.wait()
        assert handle.done
        weights: dict[str, torch.Tensor] = {}
        for file in sorted((tmp_path / "new").glob("model-*.safetensors")):
            weights |= load_file(file)
        build().load_state_dict(weights, strict=True)
        assert_same(weights, expected)
        assert manifest.step == 1

    run_ranks(3, body)


def test_large_state_that_was_loaded_is_still_there_after_the_next_save(tmp_path: Path) -> None:
    """A save gives back memory that it took, piece by piece; this is not its own."""

    def body(rank: int) -> None:
        gathering.EXCHANGE_BYTES = 2**20  # else it takes tensors of 16 MiB
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(2048, 512), nn.Linear(512, 512, bias=False))
        mesh = make_mesh(2)
        dmuon.dedicate_params(model, mesh, predicate=lambda name, _: name == "1.weight")
        fully_shard(model, mesh=mesh)
        optimizer = dmuon.Muon(model)
        model(torch.arange(rank, 99)).square().mean().backward()
        optimizer.step()
        dmuon.save_checkpoint(tmp_path / "one", model, optimizer)
        before = states(model, optimizer)
        dmuon.load_checkpoint(tmp_path / "one", model, optimizer)
        assert_same(states(model, optimizer), before)
        dmuon.save_checkpoint(tmp_path / "two", model, optimizer)
        assert_same(states(model, optimizer), before)

    run_ranks(2, body)
