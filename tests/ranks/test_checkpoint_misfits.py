"""Loading what does not fit, or is damaged: the same error on all ranks, nothing was changed."""

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_same, states
from ranks_runner import run_ranks
from safetensors.torch import save_file
from tiny import build, is_proj
from torch import nn
from torch.distributed.fsdp import fully_shard
from unit.checkpoint_builders import rewrite_manifest
from wrapped import make_mesh, train, wrap

import dmuon
from dmuon.agreement import gather_objects
from dmuon.checkpoint import loading
from dmuon.checkpoint.loading import LoadedCheckpoint, load_checkpoint
from dmuon.checkpoint.saving import save_checkpoint

NUM_RANKS = 2
Change = Callable[[nn.Module], None]


def prepared(seed: int = 0, change: Change = lambda model: None) -> tuple[nn.Module, dmuon.Muon]:
    model = build(seed)
    change(model)
    wrap(model, make_mesh(NUM_RANKS))
    return model, dmuon.Muon(model, ns_dtype=torch.float32)


def write(folder: Path, steps: int = 1) -> dict[str, Any]:
    """Make a checkpoint; what is in it."""

    def body(rank: int) -> None:
        model, optimizer = prepared()
        train(model, optimizer, range(steps))
        save_checkpoint(folder / "good", model, optimizer, extra={"a": 1})
        save_checkpoint(folder / "weights", model, step=5)
        if rank == 0:
            torch.save(states(model, optimizer), folder / "expected.pt")
        else:
            states(model, optimizer)

    run_ranks(NUM_RANKS, body)
    return torch.load(folder / "expected.pt")


def expect_refused(
    match: str, path: Path, model: nn.Module, optimizer: dmuon.Muon | None, **options: Any
) -> str:
    mine = optimizer or dmuon.Muon(model)
    before = states(model, mine)
    with pytest.raises(dmuon.CheckpointError, match=match) as caught:
        load_checkpoint(path, model, optimizer, **options)
    told = gather_objects(dmuon.dedication.of(model), (type(caught.value), str(caught.value)))
    assert len(set(told)) == 1, told
    assert_same(states(model, mine), before)
    return str(caught.value)


def rename(model: nn.Module) -> None:
    model.final_norm = model.norm
    model.forward = lambda tokens: tokens
    del model.norm


def widen(model: nn.Module) -> None:
    model.layers[1].up_proj = nn.Linear(24, 51, bias=False)
    model.layers[1].down_proj = nn.Linear(51, 24)
    model.head = nn.Linear(24, 38, bias=False)


def to_half(model: nn.Module) -> None:
    model.half()


def test_models_that_differ_are_refused_with_a_list(tmp_path: Path) -> None:
    write(tmp_path)

    def body(rank: int) -> None:
        for optimized in (True, False):
            model, optimizer = prepared(1, rename)
            text = expect_refused(
                "it does not fit, nothing was loaded",
                tmp_path / "good",
                model,
                optimizer if optimized else None,
            )
            assert "final_norm.weight: missing" in text
            assert "norm.bias: not in this model" in text
            model, optimizer = prepared(1, widen)
            text = expect_refused(
                "it does not fit", tmp_path / "good", model, optimizer if optimized else None
            )
            assert "layers.1.up_proj.weight: has shape [50, 24], needs [51, 24]" in text
            assert "head.weight: has shape [37, 24], needs [38, 24]" in text
            expect_refused("has shape", tmp_path / "good", model, None, strict=False)
        model, _ = prepared(1, to_half)
        expect_refused("pass convert_dtype=True to convert it", tmp_path / "good", model, None)

    run_ranks(NUM_RANKS, body)


def test_what_is_there_can_be_loaded_and_the_rest_is_reported(tmp_path: Path) -> None:
    expected = write(tmp_path)["model"]

    def body(rank: int) -> None:
        model, _ = prepared(1, rename)
        before = dmuon.get_model_state_dict(model)
        loaded = load_checkpoint(tmp_path / "good", model, strict=False)
        assert set(loaded.missing) == {"final_norm.weight", "final_norm.bias"}
        assert set(loaded.unexpected) == {"norm.weight", "norm.bias"}
        for name, value in dmuon.get_model_state_dict(model).items():
            assert torch.equal(value, expected[name] if name in expected else before[name]), name

    run_ranks(NUM_RANKS, body)


def test_optimizers_that_do_not_fit(tmp_path: Path) -> None:
    expected = write(tmp_path)

    def body(rank: int) -> None:
        model, _ = prepared(1)
        own = [model.layers[0].norm1.weight]
        other = dmuon.Muon(model, param_groups=[{"params": own, "adamw_lr": 0.5}])
        expect_refused("param_groups: other parameters", tmp_path / "good", model, other)
        model, optimizer = prepared(1)
        train(model, optimizer, range(2))
        expect_refused("holds no state of an optimizer", tmp_path / "weights", model, optimizer)
        kept = dmuon.get_optimizer_state_dict(model, optimizer)
        loaded = load_checkpoint(tmp_path / "good", model)
        assert loaded == LoadedCheckpoint(tmp_path / "good", 1, {"a": 1})
        assert_same(dmuon.get_model_state_dict(model), expected["model"])
        assert_same(dmuon.get_optimizer_state_dict(model, optimizer), kept)
        with pytest.raises(dmuon.SetupError, match=r"is not the dmuon\.Muon"):
            load_checkpoint(tmp_path / "good", model, prepared(2)[1])

    run_ranks(NUM_RANKS, body)


def test_weights_from_hugging_face_folders_and_single_files(tmp_path: Path) -> None:
    weights = build(3).state_dict()
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir()
    several.mkdir()
    save_file(weights, one / "model.safetensors", {"format": "pt"})
    names = sorted(weights)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: weights[name] for name in part}, several / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (several / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(weights, tmp_path / "weights.bin")

    def body(rank: int) -> None:
        paths = (one, several, one / "model.safetensors", tmp_path / "weights.bin")
        for path in paths:
            model, optimizer = prepared(1)
            expect_refused("holds no state of an optimizer", path, model, optimizer)
            assert load_checkpoint(path, model).step == 0
            assert_same(dmuon.get_model_state_dict(model), weights)

    run_ranks(NUM_RANKS, body)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_damage_that_one_rank_finds_is_the_same_error_on_all(damage: Any, tmp_path: Path) -> None:
    write(tmp_path)
    files = sorted(each.name for each in (tmp_path / "good").iterdir())

    def body(rank: int) -> None:
        model, optimizer = prepared(1)
        for number, file in enumerate(files):
            bad = tmp_path / f"bad-{number}"
            if rank == 0:
                shutil.copytree(tmp_path / "good", bad)
                damage(bad / file)
            gather_objects(dmuon.dedication.of(model), None)
            expect_refused(f"{file}|no manifest|manifest.json", bad, model, optimizer)
        train(model, optimizer, range(1))
        load_checkpoint(tmp_path / "good", model, optimizer)

    run_ranks(NUM_RANKS, body)


def test_how_contents_are_compared_is_a_choice(tmp_path: Path) -> None:
    write(tmp_path)
    good = tmp_path / "good"

    def forge(content: dict[str, Any]) -> None:
        for facts in content["files"].values():
            facts["sha256"] = "0" * 64

    rewrite_manifest(good, forge)

    def body(rank: int) -> None:
        model, optimizer = prepared(1)
        load_checkpoint(good, model, optimizer)
        expect_refused(r"SHA-256", good, model, optimizer, verify_hashes="sha256")
        expect_refused("True, False or 'sha256'", good, model, optimizer, verify_hashes="md5")
        gather_objects(dmuon.dedication.of(model), None)
        if rank == 0:
            flip(max(good.glob("optim-*")))
        gather_objects(dmuon.dedication.of(model), None)
        expect_refused("checksum", good, model, optimizer)
        load_checkpoint(good, model, optimizer, verify_hashes=False)

    run_ranks(NUM_RANKS, body)


def test_reading_that_fails_halfway_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    expected = write(tmp_path)

    def body(rank: int) -> None:
        model, optimizer = prepared(1)
        read, soft_hard = loading._Reading.read, resource.getrlimit(resource.RLIMIT_NOFILE)

        def read_without_files(each: Any) -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, soft_hard[1]))
            try:
                read(each)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, soft_hard)

        if rank == 1:
            loading._Reading.read = read_without_files
        with pytest.raises(dmuon.CheckpointError, match=r"failed halfway.*Too many open files"):
            load_checkpoint(tmp_path / "good", model, optimizer)
        loading._Reading.read = read
        load_checkpoint(tmp_path / "good", model, optimizer)
        assert_same(states(model, optimizer), expected)

    run_ranks(NUM_RANKS, body)


def test_a_buffer_that_cannot_be_filled_is_named_before_anything_changes(tmp_path: Path) -> None:
    write(tmp_path)

    def add_buffer(model: nn.Module) -> None:
        model.register_buffer("mask", torch.ones(3, 1).expand(3, 4))

    def body(rank: int) -> None:
        model, optimizer = prepared(seed=1, change=add_buffer)
        save_checkpoint(tmp_path / "expanded", model, optimizer)
        expect_refused("mask: is expanded here", tmp_path / "expanded", model, optimizer)
        model.register_buffer("mask", model.mask.clone())
        load_checkpoint(tmp_path / "expanded", model, optimizer)

    run_ranks(NUM_RANKS, body)


def test_a_model_without_values_is_not_saved_but_filled(tmp_path: Path) -> None:
    expected = write(tmp_path)["model"]

    def body(rank: int) -> None:
        with torch.device("meta"):
            model = build()
        dmuon.dedicate_params(model, make_mesh(NUM_RANKS), predicate=is_proj)
        fully_shard(model, mesh=make_mesh(NUM_RANKS))
        with pytest.raises(dmuon.CheckpointError, match="has no values yet"):
            save_checkpoint(tmp_path / "new", model)
        with pytest.raises(dmuon.CheckpointError, match=r"call model\.to_empty"):
            load_checkpoint(tmp_path / "good", model)
        model.to_empty(device="cpu")
        load_checkpoint(tmp_path / "good", model)
        assert_same(dmuon.get_model_state_dict(model), expected)
        train(model, dmuon.Muon(model), range(1))

    run_ranks(NUM_RANKS, body)
