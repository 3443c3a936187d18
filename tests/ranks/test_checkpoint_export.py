"""Weights of a checkpoint as other programs read them."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from first_release import recipe
from ranks_runner import run_ranks
from safetensors.torch import load_file
from saved import CONFIG, flip, hand_made, tied, weights_of, write_checkpoints
from tiny import TinyModel
from torch import nn
from torch.distributed.fsdp import fully_shard
from wrapped import make_mesh, wrap

import dmuon
from dmuon import save_checkpoint
from dmuon.checkpoint.facts import DTYPES

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_checkpoints(folder)
    return folder


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(written, tmp_path / "run"))


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
        assert ours[name].dtype == value.dtype


@pytest.mark.parametrize("ending", [".pt", ".pth", ".bin"])
def test_one_file_for_torch_loads_strictly_with_tied_weights_stored_once(
    written: Path, tmp_path: Path, ending: str
) -> None:
    target = tmp_path / f"weights{ending}"
    done = dmuon.export_weights(written / "step-2", target)
    weights = torch.load(target, weights_only=True)
    model = tied()
    model.load_state_dict(weights, strict=True)
    stored = weights_of(written / "step-2")
    assert_equal({name: p.detach() for name, p in model.named_parameters()}, stored)
    assert weights["head.weight"].data_ptr() == weights["embed.weight"].data_ptr()
    assert target.stat().st_size < 1.5 * done.num_bytes
    assert [each.name for each in tmp_path.iterdir()] == [target.name]


def test_one_safetensors_file_holds_the_weights(written: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "weights.safetensors"
    done = dmuon.export_weights(written / "step-2", target)
    assert_equal(load_file(target), weights_of(written / "step-2"))
    assert done.files == {target.name: target.stat().st_size}


def test_a_folder_is_sharded_at_the_size_that_was_asked_for(written: Path, tmp_path: Path) -> None:
    most = 10_000
    done = dmuon.export_weights(written / "step-2", tmp_path / "out", max_shard_bytes=most)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3
    for shard in shards:
        held = load_file(shard)
        assert len(held) == 1 or sum(each.nbytes for each in held.values()) <= most
    assert_equal(weights_of(tmp_path / "out"), weights_of(written / "step-2"))
    assert (tmp_path / "out" / "config.json").read_bytes() == CONFIG
    others = done.files.keys() - {shard.name for shard in shards}
    assert others == {"config.json", "model.safetensors.index.json"}
    assert dmuon.diff_checkpoints(tmp_path / "out", written / "step-2").is_same


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("target", ["out", "out.pt", "out.safetensors"])
def test_every_dtype_is_exported_bit_by_bit(
    tmp_path: Path, dtype: torch.dtype, target: str
) -> None:
    bits = torch.arange(48, dtype=torch.uint8) if dtype != torch.bool else torch.ones(48).bool()
    tensors = {
        "matrix": bits.view(dtype).view(2, -1),
        "scalar": bits.view(dtype)[0].clone(),
        "empty": torch.empty((0, 3), dtype=dtype),
    }
    hand_made(tmp_path / "from", 1, tensors)
    dmuon.export_weights(tmp_path / "from", tmp_path / target)
    source = dmuon.diff_checkpoints(tmp_path / "from", tmp_path / target)
    assert (source.is_same, source.num_compared) == (True, 3)


def test_nothing_is_overwritten_and_nothing_damaged_is_exported(run: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file.pt").write_text("mine")
    for target in ("full", "file.pt"):
        with pytest.raises(dmuon.CheckpointError, match="nothing is overwritten"):
            dmuon.export_weights(run / "step-1", tmp_path / target)
    flip(run / "step-1" / "model-00002-of-00002.safetensors")
    with pytest.raises(dmuon.CheckpointError, match="nothing is overwritten"):
        dmuon.export_weights(run / "step-1", tmp_path / "full")  # before anything is read
    for target in ("new", "new.pt", "new.safetensors"):
        with pytest.raises(dmuon.DamagedCheckpointError, match="model-00002"):
            dmuon.export_weights(run / "step-1", tmp_path / target)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file.pt", "full", "run"]
    assert (tmp_path / "full" / "mine").read_text() == (tmp_path / "file.pt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    dmuon.export_weights(run / "step-2", tmp_path / "empty")


@pytest.mark.parametrize("target", ["new", "new.pt", "new.safetensors"])
def test_an_export_that_reads_back_otherwise_is_an_error_and_leaves_nothing(
    written: Path, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on storage that returns other bytes than it was given."""
    from dmuon.checkpoint import export

    value = weights_of(written / "step-1")["layers.0.up_proj.weight"].numpy().tobytes()
    real = export._compare

    def spoil_and_compare(source: Any, path: Path, target: Path) -> None:
        for file in [path] if path.is_file() else path.glob("*.safetensors"):
            flip(file, at=file.read_bytes().index(value))
        real(source, path, target)

    monkeypatch.setattr(export, "_compare", spoil_and_compare)
    with pytest.raises(dmuon.CheckpointError, match=r"up_proj\.weight' reads back otherw"):
        dmuon.export_weights(written / "step-1", tmp_path / target)
    assert list(tmp_path.iterdir()) == []


class Counting(TinyModel):
    """Has state that is no tensor."""

    counts: dict[str, Any]

    def get_extra_state(self) -> dict[str, Any]:
        return self.counts

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.counts = state


def test_a_file_for_torch_has_the_plain_state_of_modules_too(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model = Counting()
        model.counts = {"seen": 3, "shape": (1, 2)}
        save_checkpoint(tmp_path / "step-1", wrap(model, make_mesh(1)))

    run_ranks(1, body)
    dmuon.export_weights(tmp_path / "step-1", tmp_path / "one.pt")
    model = Counting()
    model.load_state_dict(torch.load(tmp_path / "one.pt", weights_only=True), strict=True)
    assert model.counts == {"seen": 3, "shape": (1, 2)}
    assert dmuon.diff_checkpoints(tmp_path / "step-1", tmp_path / "one.pt").is_same

    def load(rank: int) -> None:
        torch.manual_seed(1)
        model = Counting()
        model.counts = {}
        wrap(model, make_mesh(2))
        dmuon.load_checkpoint(tmp_path / "one.pt", model)
        assert model.counts == {"seen": 3, "shape": (1, 2)}
        found = dmuon.get_model_state_dict(model)
        del found["_extra_state"]
        assert_equal(found, weights_of(tmp_path / "step-1"))
        without = wrap(TinyModel(), make_mesh(2))
        with pytest.raises(dmuon.CheckpointError, match="_extra_state: not in this model"):
            dmuon.load_checkpoint(tmp_path / "one.pt", without)

    run_ranks(2, load)


def test_the_first_release_goes_through_a_file_for_torch(tmp_path: Path) -> None:
    """Also what modules keep as tensors, and one weight under two names."""
    dmuon.export_weights(recipe.CHECKPOINT, tmp_path / "all.pt")

    def body(rank: int) -> None:
        models = [recipe.Model(), recipe.Model()]
        for model, path in zip(models, (recipe.CHECKPOINT, tmp_path / "all.pt"), strict=True):
            recipe.forget(model)
            recipe.wrap(model, make_mesh(2))
            dmuon.load_checkpoint(path, model)
        ours, theirs = (dmuon.get_model_state_dict(model) for model in models)
        assert torch.equal(ours.pop("tensor._extra_state"), theirs.pop("tensor._extra_state"))
        assert ours.pop("plain._extra_state") == theirs.pop("plain._extra_state")
        assert_equal(ours, theirs)

    run_ranks(2, body)


def tied_llama(transformers: Any) -> Any:
    return transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=41,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )


def test_transformers_opens_what_was_exported_and_gives_equal_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    config = tied_llama(transformers)
    rows = torch.arange(24).view(2, 12)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)

    def body(rank: int) -> None:
        model, mesh = make(), make_mesh(2)
        dmuon.dedicate_params(model, mesh)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = dmuon.Muon(model)
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        files = {"config.json": config.to_json_string().encode()}
        save_checkpoint(tmp_path / "step-1", model, optimizer, files=files)
        with torch.no_grad():
            logits = model(input_ids=rows).logits
        if rank == 0:
            torch.save(logits, tmp_path / "logits.pt")

    run_ranks(2, body)
    expected = torch.load(tmp_path / "logits.pt")
    dmuon.export_weights(tmp_path / "step-1", tmp_path / "hf", max_shard_bytes=20_000)
    dmuon.export_weights(tmp_path / "step-1", tmp_path / "one.pt")
    for folder in ("hf", "step-1"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        with torch.no_grad():
            assert torch.equal(loaded(input_ids=rows).logits, expected)
    plain = make()
    plain.load_state_dict(torch.load(tmp_path / "one.pt", weights_only=True), strict=True)
    with torch.no_grad():
        assert torch.equal(plain(input_ids=rows).logits, expected)
