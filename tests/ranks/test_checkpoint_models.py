"""Checkpoints of all kinds of models: written on one mesh, read on another, equal by value."""

import dataclasses
from pathlib import Path
from typing import Any

import fuzz  # noqa: F401 - it makes the next one importable
import fuzz_case
import pytest
import torch
import torch.nn.functional as F
from checkpoints import assert_same, states
from fuzz_case import Case
from ranks_runner import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from wrapped import make_mesh, prepare, train

import dmuon
from dmuon.checkpoint.loading import load_checkpoint
from dmuon.checkpoint.manifest import read_manifest
from dmuon.checkpoint.saving import save_checkpoint

SEEDS = range(5)


@pytest.mark.parametrize("ranks", [(2, 3), (4, 2), (3, 4), (1, 4)], ids="{0[0]} to {0[1]}".format)
def test_random_models_and_settings(ranks: tuple[int, int], tmp_path: Path) -> None:
    written_on, read_on = ranks
    cases = [Case.draw(seed + 100 * written_on, written_on) for seed in SEEDS]

    def write(rank: int) -> None:
        for case in cases:
            model, optimizer = fuzz_case._prepare(case)
            for number, step in enumerate(case.steps[: case.seed % 3]):  # some never step
                fuzz_case._step(case, number, step, model, optimizer)
            expected = states(model, optimizer)
            handle = save_checkpoint(tmp_path / str(case.seed), model, optimizer, async_save=True)
            if rank == 0:
                torch.save(expected, tmp_path / f"{case.seed}.pt")
        handle.wait()

    def read(rank: int) -> None:
        for case in cases:
            mesh = Case.draw(case.seed, read_on).mesh
            model, optimizer = fuzz_case._prepare(
                dataclasses.replace(case, mesh=mesh, seed=-case.seed)
            )
            if case.seed % 2:  # what the optimizer had before is gone
                fuzz_case._step(case, 0, case.steps[0], model, optimizer)
            load_checkpoint(tmp_path / str(case.seed), model, optimizer)
            expected = torch.load(tmp_path / f"{case.seed}.pt")
            assert_same(states(model, optimizer), expected, str(case))

    run_ranks(written_on, write)
    run_ranks(read_on, read)


class Odd(nn.Module):
    """Everything at once that a state dict can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.first_proj = nn.Linear(6, 6)
        self.second_proj = nn.Linear(6, 6, bias=False)
        self.second_proj.weight = self.first_proj.weight
        self.low_proj = nn.Linear(6, 6, bias=False, dtype=torch.bfloat16)
        self.frozen_proj = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.unused_proj = nn.Linear(6, 5)
        self.normed = nn.BatchNorm1d(6)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.gate = nn.Parameter(torch.randn(1))
        self.scale = nn.Parameter(torch.randn(()), requires_grad=False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("coarse", torch.randn(2, 3).to(torch.float16))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("unsaved", torch.randn(2), persistent=False)
        self.counter = Counter()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.first_proj(self.embed(tokens))
        x = x + self.low_proj(x.bfloat16()).float() + self.second_proj(x)
        x = self.normed(self.frozen_proj(x).flatten(0, 1)).view_as(x)
        self.counter.calls.append(len(tokens))
        self.counter.child.history = torch.arange(len(self.counter.calls))
        return self.head(x * self.gate * self.scale)


class History(nn.Module):
    history = torch.zeros(3)

    def get_extra_state(self) -> torch.Tensor:
        return self.history

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.history = state


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.child = History()

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "pair": (1, 2.5, None), "dtype": torch.bfloat16}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert (state["pair"], state["dtype"]) == ((1, 2.5, None), torch.bfloat16)
        self.calls = state["calls"]


def odd(*mesh: int, seed: int = 0) -> tuple[Odd, dmuon.Muon]:
    torch.manual_seed(seed)
    model, on = Odd(), make_mesh(*mesh)
    dmuon.dedicate_params(model, on, predicate=lambda name, _: name.endswith("proj.weight"))
    fully_shard(model, mesh=on, ignored_params={model.scale})
    return model, dmuon.Muon(model, ns_dtype=torch.float32)


def step_odd(model: Odd, optimizer: dmuon.Muon, rank: int) -> float:
    torch.manual_seed(rank)
    tokens = torch.randint(0, 7, (2, 4))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


@pytest.mark.parametrize("meshes", [((2,), (2, 2)), ((2, 2), (3,)), ((4,), (1,))], ids=str)
def test_a_model_with_everything(meshes: tuple[tuple[int, ...], ...], tmp_path: Path) -> None:
    written_on, read_on = meshes

    def write(rank: int) -> None:
        model, optimizer = odd(*written_on)
        step_odd(model, optimizer, rank)
        save_checkpoint(tmp_path / "new", model, optimizer)
        expected = states(model, optimizer)
        if rank == 0:
            torch.save(expected, tmp_path / "expected.pt")

    def read(rank: int) -> None:
        model, optimizer = odd(*read_on, seed=1)
        unsaved = model.unsaved.clone()
        load_checkpoint(tmp_path / "new", model, optimizer)
        assert_same(without_lists(states(model, optimizer)), without_lists(expected()))
        assert torch.equal(model.unsaved, unsaved)
        assert model.counter.calls == [2]
        assert torch.equal(model.counter.child.history, torch.arange(1))
        step_odd(model, optimizer, rank)
        load_checkpoint(tmp_path / "new", model, optimizer)
        assert_same(without_lists(states(model, optimizer)), without_lists(expected()))

    def expected() -> dict[str, Any]:
        return torch.load(tmp_path / "expected.pt")

    run_ranks(int(torch.tensor(written_on).prod()), write)
    run_ranks(int(torch.tensor(read_on).prod()), read)
    manifest = read_manifest(tmp_path / "new")
    assert manifest.tied == {
        "second_proj.weight": "first_proj.weight",
        "head.weight": "embed.weight",
    }
    assert list(manifest.module_state) == ["counter._extra_state"]


def without_lists(state: dict[str, Any]) -> dict[str, Any]:
    """Without what ``==`` cannot compare, and a frozen parameter that is in a group on one rank."""
    for group in state["optimizer"]["param_groups"]:
        group["names"] = [name for name in group["names"] if name != "scale"]
    return state | {"model": {k: v for k, v in state["model"].items() if "_extra" not in k}}


class Resting(nn.Module):
    """A frozen parameter that nobody shards, in a group on one rank and in none on several."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(5, 7)
        self.out = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.randn(()), requires_grad=False)
        self.at_rest = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.in_proj(x)) * self.scale


def resting(num_ranks: int, rate: float, seed: int) -> tuple[nn.Module, dmuon.Muon]:
    torch.manual_seed(seed)
    model, mesh = Resting(), make_mesh(num_ranks)
    dmuon.dedicate_params(model, mesh, predicate=lambda name, _: name == "in_proj.weight")
    fully_shard(model, mesh=mesh, ignored_params={model.scale})
    trained = ["in_proj.weight", "in_proj.bias", "out.weight", "out.bias"]
    at_rest = ["at_rest.weight", "at_rest.bias"]
    groups = [{"params": names, "adamw_lr": rate} for names in (trained, at_rest)]
    return model, dmuon.Muon(model, ns_dtype=torch.float32, param_groups=groups)


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 3)], ids="{0[0]} to {0[1]}".format)
def test_frozen_parameters_that_nobody_shards(ranks: tuple[int, int], tmp_path: Path) -> None:
    """State dicts and checkpoints have one rule for them; the rates of all groups come back."""

    def write(rank: int) -> None:
        model, optimizer = resting(ranks[0], rate=0.25, seed=0)
        model(torch.ones(3, 5)).square().mean().backward()
        optimizer.step()
        save_checkpoint(tmp_path / "new", model, optimizer)
        state = states(model, optimizer)
        if rank == 0:
            torch.save(state, tmp_path / "state.pt")

    def read(rank: int) -> None:
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        for number in range(2):
            model, optimizer = resting(ranks[1], rate=0.75, seed=1)
            if number == 0:
                load_checkpoint(tmp_path / "new", model, optimizer)
            else:
                dmuon.set_model_state_dict(model, state["model"])
                dmuon.set_optimizer_state_dict(model, optimizer, state["optimizer"])
            assert_same(without_groups(states(model, optimizer)), without_groups(state))
            rates = {n: g["lr"] for g in optimizer.param_groups for n in g["names"]}
            assert [rates[n] for n in ("in_proj.bias", "out.weight", "at_rest.weight")] == [
                0.25
            ] * 3
        for group in state["optimizer"]["param_groups"]:
            group["names"] = ["other" if n == "out.weight" else n for n in group["names"]]
        with pytest.raises(dmuon.StateDictError, match="param_groups: other parameters"):
            dmuon.set_optimizer_state_dict(model, optimizer, state["optimizer"])

    run_ranks(ranks[0], write)
    run_ranks(ranks[1], read)


def without_groups(state: dict[str, Any]) -> dict[str, Any]:
    inner = {key: value for key, value in state["optimizer"].items() if key != "param_groups"}
    return state | {"optimizer": inner}


def test_extra_state_that_is_not_plain_is_refused_by_name(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = odd(2)
        model.counter.calls = [{1, 2}]
        match = r"counter\._extra_state.* is a set: not plain"
        with pytest.raises(dmuon.CheckpointError, match=match):
            save_checkpoint(tmp_path / "new", model, optimizer)
        assert not (tmp_path / "new").exists()

    run_ranks(2, body)


def test_shards_by_another_dim(tmp_path: Path) -> None:
    def wrapped_by(dim: int, seed: int) -> tuple[nn.Module, dmuon.Muon]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 8))
        mesh = make_mesh(2)
        dmuon.dedicate_params(model, mesh, predicate=lambda name, _: name == "0.weight")
        place = (lambda p: Shard(min(dim, p.ndim - 1))) if dim else None
        fully_shard(model, mesh=mesh, shard_placement_fn=place)
        return model, dmuon.Muon(model, ns_dtype=torch.float32)

    def body(rank: int) -> None:
        for written, read in ((1, 0), (0, 1), (1, 1)):
            model, optimizer = wrapped_by(written, 0)
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            path = tmp_path / f"{written}{read}"
            save_checkpoint(path, model, optimizer)
            other, its_optimizer = wrapped_by(read, 1)
            load_checkpoint(path, other, its_optimizer)
            assert_same(states(other, its_optimizer), states(model, optimizer))

    run_ranks(2, body)


def test_a_grid_given_apart_whose_ranks_do_not_ascend_row_by_row(tmp_path: Path) -> None:
    def prepared(seed: int) -> tuple[nn.Module, dmuon.Muon]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        # of all ranks: [[0, 2], [1, 3]]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
        grid = torch.distributed.device_mesh.DeviceMesh(
            "cpu", mesh.mesh.T, mesh_dim_names=("replicate", "shard")
        )
        dmuon.dedicate_params(
            model,
            mesh["shard"],
            lambda name, _: name == "0.weight",
            replicate_mesh=mesh["replicate"],
        )
        fully_shard(model, mesh=grid)
        return model, dmuon.Muon(model, ns_dtype=torch.float32)

    def body(rank: int) -> None:
        model, optimizer = prepared(0)
        model(torch.randn(3, 5)).square().mean().backward()
        optimizer.step()
        save_checkpoint(tmp_path / "new", model, optimizer)
        expected = states(model, optimizer)
        other, its_optimizer = prepared(1)
        load_checkpoint(tmp_path / "new", other, its_optimizer)
        assert_same(states(other, its_optimizer), expected)
        plain, plains_optimizer = prepared(2)
        dmuon.set_model_state_dict(plain, expected["model"])
        dmuon.set_optimizer_state_dict(plain, plains_optimizer, expected["optimizer"])
        assert_same(states(plain, plains_optimizer), states(other, its_optimizer))

    run_ranks(4, body)


def test_groups_with_rates_of_their_own_and_a_schedule(tmp_path: Path) -> None:
    def prepared(rate: float, seed: int) -> tuple[nn.Module, dmuon.Muon, Any]:
        model = prepare(make_mesh(2), seed=seed)
        own = [p for n, p in model.named_parameters() if n.startswith(("layers.0.norm", "embed"))]
        groups = [{"params": own, "adamw_lr": rate, "adamw_weight_decay": 0.0}]
        optimizer = dmuon.Muon(model, param_groups=groups, ns_dtype=torch.float32)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def go_on(model: nn.Module, optimizer: dmuon.Muon, schedule: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            losses += train(model, optimizer, range(step, step + 1))
            schedule.step()
        return losses

    def body(rank: int) -> None:
        model, optimizer, schedule = prepared(0.1, 0)
        go_on(model, optimizer, schedule, range(2))
        extra = {"schedule": schedule.state_dict()}
        save_checkpoint(tmp_path / "new", model, optimizer, extra=extra)
        losses = go_on(model, optimizer, schedule, range(2, 4))
        other, its_optimizer, its_schedule = prepared(0.7, 1)
        loaded = load_checkpoint(tmp_path / "new", other, its_optimizer)
        its_schedule.load_state_dict(loaded.extra["schedule"])
        rates = [group["lr"] for group in its_optimizer.param_groups]
        assert rates == [group["lr"] / 0.5**2 for group in optimizer.param_groups]
        assert 0.1 * 0.5**2 in rates
        assert go_on(other, its_optimizer, its_schedule, range(2, 4)) == losses
        assert_same(states(other, its_optimizer), states(model, optimizer))

    run_ranks(2, body)


def bf16(*mesh: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model, on = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(dtype), make_mesh(*mesh)
    dmuon.dedicate_params(model, on, predicate=lambda name, _: name == "0.weight")
    fully_shard(model, mesh=on)
    return model, dmuon.Muon(model, ns_dtype=torch.float32)


@pytest.mark.parametrize(
    ("written_in", "read_in"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_master_weights_and_conversion(
    written_in: torch.dtype, read_in: torch.dtype, tmp_path: Path
) -> None:
    def body(rank: int) -> None:
        model, optimizer = bf16(2, dtype=written_in)
        for _ in range(2):
            model(torch.ones(3, 5, dtype=written_in)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        save_checkpoint(tmp_path / "new", model, optimizer)
        other, its_optimizer = bf16(2, dtype=read_in, seed=1)
        before = states(other, its_optimizer)
        if written_in != read_in:
            with pytest.raises(dmuon.CheckpointError, match="pass convert_dtype=True"):
                load_checkpoint(tmp_path / "new", other, its_optimizer)
            assert_same(states(other, its_optimizer), before)
        load_checkpoint(tmp_path / "new", other, its_optimizer, convert_dtype=True)
        ours, theirs = master(model, optimizer), master(other, its_optimizer)
        assert torch.equal(ours, theirs), "the float32 values of the owner"
        same = states(other, its_optimizer)["model"]
        for name, value in states(model, optimizer)["model"].items():
            bound = {} if written_in == read_in else {"rtol": 2**-7, "atol": 0}
            torch.testing.assert_close(same[name].float(), value.float(), **bound)
            assert same[name].dtype == read_in

    run_ranks(2, body)


def master(model: nn.Module, optimizer: dmuon.Muon) -> torch.Tensor:
    """The float32 values of the one dedicated matrix."""
    state = dmuon.get_optimizer_state_dict(model, optimizer)["dedicated"]["0.weight"]
    whole = dmuon.get_model_state_dict(model)["0.weight"]
    return state.get("master_weight", whole)


@pytest.mark.parametrize("has_stepped", [True, False], ids=["into stepped", "into fresh"])
def test_a_checkpoint_from_before_the_first_step(has_stepped: bool, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        save_checkpoint(tmp_path / "new", model, optimizer)
        losses = train(model, optimizer, range(2))
        other = prepare(make_mesh(2), seed=1)
        its_optimizer = dmuon.Muon(other, ns_dtype=torch.float32)
        if has_stepped:
            train(other, its_optimizer, range(1))
        assert load_checkpoint(tmp_path / "new", other, its_optimizer).step == 0
        assert train(other, its_optimizer, range(2)) == losses

    run_ranks(2, body)
