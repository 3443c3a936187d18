"""The checkpoint that the first release of the format wrote, kept beside the tests, still loads."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from first_release import recipe
from ranks_runner import run_ranks
from safetensors import safe_open
from torch import nn
from wrapped import make_mesh

import dmuon
from dmuon.checkpoint.manifest import MANIFEST_FILE, read_manifest
from dmuon.checkpoint.source import open_source

MANIFEST_SHA256 = "f09951030eb9b90f391878fa8cdae504161aca917a1b64d56787c4d874dbb8d4"
"""Of a manifest that was written once; it has the hashes of all other files."""
MESHES = [(1,), (2,), (3,), (2, 2)]


def expected() -> dict[str, Any]:
    return json.loads(recipe.EXPECTED.read_text())


def assert_facts(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, facts in wanted.items():
        assert found[name] == facts, name


def assert_by_formula(values: dict[str, Any]) -> None:
    assert torch.equal(values["frozen"], recipe.ramp(5, 3))
    assert torch.equal(values["coarse"], recipe.ramp(2, 3).to(torch.float16))
    assert values["mask"].tolist() == [True, False, True]
    assert values["nothing"].shape == (0, 4)


def test_its_files_are_the_bytes_that_were_written() -> None:
    data = (recipe.CHECKPOINT / MANIFEST_FILE).read_bytes()
    assert hashlib.sha256(data).hexdigest() == MANIFEST_SHA256, "made anew, or changed by a tool"
    about = dmuon.verify_checkpoint(recipe.CHECKPOINT)
    assert (about.step, about.extra) == (recipe.NUM_STEPS, recipe.EXTRA)
    assert about.mesh == {"replicate": 2, "shard": 2}
    assert (about.unlisted, about.tied) == ((), {"head.weight": "embed.weight"})
    assert (recipe.CHECKPOINT / "config.json").read_bytes() == recipe.CONFIG


def test_it_is_read_without_ranks(tmp_path: Path) -> None:
    wanted = expected()["state"]
    source = open_source(recipe.CHECKPOINT)
    weights = {name: source.read(name) for name in source.names}
    plain = read_manifest(recipe.CHECKPOINT).module_state
    found = {f"model/{name}": recipe.described(v) for name, v in (weights | dict(plain)).items()}
    optimizer_state = dmuon.read_optimizer_state(recipe.CHECKPOINT)
    assert_facts(found | recipe.facts_of_optimizer(optimizer_state), wanted)
    assert_by_formula(weights)
    by_others: dict[str, torch.Tensor] = {}
    for file in sorted(recipe.CHECKPOINT.glob("model-*.safetensors")):
        with safe_open(file, "pt") as opened:
            by_others |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert_by_formula(by_others)
    dmuon.export_weights(recipe.CHECKPOINT, tmp_path / "all.pt")
    model = recipe.Model()
    recipe.forget(model)
    model.load_state_dict(torch.load(tmp_path / "all.pt", weights_only=True), strict=True)
    found = {f"model/{name}": recipe.described(v) for name, v in model.state_dict().items()}
    assert_facts(found, {name: f for name, f in wanted.items() if name.startswith("model/")})


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_it_is_loaded_on_any_mesh_and_training_goes_on(shape: tuple[int, ...]) -> None:
    def body(rank: int) -> None:
        torch.manual_seed(1)
        model = recipe.Model()
        recipe.forget(model)
        recipe.wrap(model, make_mesh(*shape))
        optimizer = recipe.optimizer_of(model)
        for group in optimizer.param_groups:
            group["lr"] = 0.7
        loaded = dmuon.load_checkpoint(recipe.CHECKPOINT, model, optimizer)
        assert (loaded.step, loaded.extra) == (recipe.NUM_STEPS, recipe.EXTRA)
        assert_facts(recipe.facts_of_state(model, optimizer), expected()["state"])
        assert_by_formula(dmuon.get_model_state_dict(model))
        assert_kept(model)
        steps = range(recipe.NUM_STEPS, recipe.NUM_STEPS + recipe.NUM_MORE_STEPS)
        losses = recipe.train(model, optimizer, steps)
        wanted = expected()["losses"][recipe.NUM_STEPS :]
        torch.testing.assert_close(losses, wanted, rtol=0, atol=1e-3)

    run_ranks(int(torch.tensor(shape).prod()), body)


def assert_kept(model: nn.Module) -> None:
    assert model.plain.kept == {"calls": [1, 2], "pair": (3, 0.5, None), "dtype": torch.bfloat16}
    assert model.tensor.kept.tolist() == [0, 1, 4, 9, 16]
    assert model.head.weight is model.embed.weight
