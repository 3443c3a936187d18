"""Tools over folders of checkpoints: what they list, describe, verify, export and compare."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks_runner import run_ranks
from safetensors.torch import load_file, save_file
from saved import CONFIG, tied, write_checkpoints
from torch import nn
from torch.distributed.fsdp import fully_shard
from wrapped import make_mesh

import dmuon
from dmuon.checkpoint import manifest as manifests
from dmuon.checkpoint.facts import DTYPES, facts_of
from dmuon.checkpoint.manifest import Manifest, OptimizerFacts, write_manifest
from dmuon.checkpoint.saving import save_checkpoint
from dmuon.checkpoint.tensor_file import write_tensors


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_checkpoints(folder)
    return folder


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(written, tmp_path / "run"))


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def optim_file(checkpoint: Path) -> Path:
    return checkpoint / "optim-00001-of-00002.safetensors"


def hand_made(
    folder: Path,
    step: int,
    tensors: dict[str, torch.Tensor],
    *,
    optimizer: OptimizerFacts | None = None,
    extra: dict[str, object] | None = None,
    tied: dict[str, str] | None = None,
) -> Path:
    """A checkpoint of given weights, without a model."""
    folder.mkdir(parents=True)
    facts = {name: facts_of(tensor) for name, tensor in tensors.items()}
    files = {"model.safetensors": write_tensors(folder / "model.safetensors", facts, tensors.get)}
    mesh = {"replicate": 1, "shard": 1}
    by_file = {"model.safetensors": facts}
    manifest = Manifest(step, files, by_file, mesh, tied or {}, optimizer, extra or {})
    write_manifest(folder, manifest)
    return folder


def test_checkpoints_are_listed_by_step_whatever_they_are_called(tmp_path: Path) -> None:
    for name, step in (("b", 9), ("c", 10), ("a", 100)):
        hand_made(tmp_path / name, step, {"w": torch.zeros(2, 3)})
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "out.txt").write_text("no checkpoint")
    (tmp_path / "notes.txt").write_text("nor this")
    found = dmuon.list_checkpoints(tmp_path)
    assert [(each.path.name, each.step) for each in found.whole] == [
        ("b", 9),
        ("c", 10),
        ("a", 100),
    ]
    assert {(each.num_weights, each.has_optimizer) for each in found.whole} == {(1, False)}
    assert found.passed_over == ()


def test_what_is_not_whole_is_listed_apart_by_name_and_with_the_reason(run: Path) -> None:
    for name in ("cut", "gone", "header", "unfinished"):
        shutil.copytree(run / "step-1", run / name)
    cut(optim_file(run / "cut"))
    optim_file(run / "gone").unlink()
    flip(run / "header" / "manifest.json", at=500)
    (run / "unfinished" / "manifest.json").unlink()
    (run / "begun").mkdir()
    found = dmuon.list_checkpoints(run)
    assert [each.path.name for each in found.whole] == ["step-1", "step-2"]
    assert all(each.has_optimizer and each.num_weights == 44 for each in found.whole)
    reasons = {each.path.name: (each.is_damaged, each.reason) for each in found.passed_over}
    assert list(reasons) == ["begun", "cut", "gone", "header", "unfinished"]
    for name, damaged, words in (
        ("begun", False, "never finished"),
        ("cut", True, "optim-00001-of-00002.safetensors was cut"),
        ("gone", True, "optim-00001-of-00002.safetensors is missing"),
        ("header", True, "changed since it was written"),
        ("unfinished", False, "never finished"),
    ):
        assert reasons[name][0] is damaged, name
        assert words in reasons[name][1]


def test_listing_thousands_reads_each_manifest_once_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hand_made(tmp_path / "run" / "0", 0, {"w": torch.zeros(3)})
    for number in range(1, 2000):
        folder = tmp_path / "run" / str(number)
        folder.mkdir()
        for name in ("model.safetensors", "manifest.json"):
            os.link(first / name, folder / name)
    opened: list[Path] = []
    real = Path.open

    def counting(path: Path, *args: object, **options: object) -> object:
        opened.append(path)
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "open", counting)
    assert len(dmuon.list_checkpoints(tmp_path / "run").whole) == 2000
    assert {path.name for path in opened} == {"manifest.json"}
    assert len(opened) == len(set(opened)) == 2000


def test_a_description_says_what_was_saved(written: Path) -> None:
    about = dmuon.describe_checkpoint(written / "step-2")
    assert (about.step, about.mesh) == (2, {"replicate": 1, "shard": 2})
    assert about.extra == {"tokens": 192, "betas": (0.9, 0.95)}
    assert about.tied == {"head.weight": "embed.weight"}
    assert about.optimizer is not None
    assert about.optimizer.num_steps == 2
    assert {"torch", "dmuon"} <= about.versions.keys()
    on_disk = {each.name: each.stat().st_size for each in (written / "step-2").iterdir()}
    assert about.files == on_disk
    assert about.num_bytes == sum(on_disk.values())
    model = tied()
    weights = about.sections["model"]
    num_values = sum(param.numel() for param in model.parameters())
    assert weights.num_tensors == len(list(model.parameters()))
    assert (weights.num_bytes, weights.dtypes) == (4 * num_values, {"F32": 4 * num_values})
    hidden = sum("proj.weight" in name for name, _ in model.named_parameters())
    assert about.sections["optim"].num_tensors == hidden + 2 * (weights.num_tensors - hidden)
    assert (about.problem, about.unlisted) == (None, ())


def test_a_description_names_strange_files_and_what_sizes_show(run: Path) -> None:
    (run / "step-1" / "pytorch_model.bin").write_bytes(b"strange")
    cut(optim_file(run / "step-1"))
    about = dmuon.describe_checkpoint(run / "step-1")
    assert about.unlisted == ("pytorch_model.bin",)
    assert "optim-00001-of-00002.safetensors was cut" in (about.problem or "")


def test_verifying_names_every_file_that_is_not_what_was_written(run: Path) -> None:
    assert dmuon.verify_checkpoint(run / "step-1").step == 1
    flip(optim_file(run / "step-1"))
    (run / "step-1" / "config.json").unlink()
    with pytest.raises(dmuon.DamagedCheckpointError) as caught:
        dmuon.verify_checkpoint(run / "step-1")
    assert "optim-00001-of-00002.safetensors has changed" in caught.value.reason
    assert "config.json is missing" in caught.value.reason
    assert "model-" not in caught.value.reason


TOOLS = [
    dmuon.describe_checkpoint,
    dmuon.verify_checkpoint,
    dmuon.read_optimizer_state,
    lambda path: dmuon.export_weights(path, path.parent / "out"),
]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_folder_of_the_platforms_own_format_is_named_as_such(
    tool: Callable[[Path], object], tmp_path: Path
) -> None:
    from dmuon_platform.store import CheckpointStore

    store = CheckpointStore(tmp_path)
    old = store.save(3, {"w": torch.zeros(2)}, {}, {}, {}).path
    with pytest.raises(
        dmuon.CheckpointError, match="format in which dmuon_platform keeps its runs"
    ):
        tool(old)
    (passed_over,) = dmuon.list_checkpoints(old.parent).passed_over
    assert "dmuon_platform" in passed_over.reason
    assert not passed_over.is_damaged
    assert not (old.parent / "out").exists()


@pytest.mark.parametrize("tool", [*TOOLS, dmuon.list_checkpoints])
def test_a_path_where_nothing_is_is_bad_use_rather_than_damage(
    tool: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(dmuon.CheckpointError, match="there is no such folder") as caught:
        tool(tmp_path / "nowhere")
    assert not isinstance(caught.value, dmuon.DamagedCheckpointError)


def test_listing_a_checkpoint_points_to_the_folder_around_it(written: Path) -> None:
    with pytest.raises(dmuon.CheckpointError, match=f"give the folder around it: {written}"):
        dmuon.list_checkpoints(written / "step-1")


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("model*.safetensors"):
        weights |= load_file(file)
    return weights


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

    real = export.open_source

    def open_and_spoil(path: Path) -> object:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        flip(files[0], at=-1 if path.suffix != ".pt" else files[0].stat().st_size // 2)
        return real(path)

    monkeypatch.setattr(export, "open_source", open_and_spoil)
    with pytest.raises(dmuon.CheckpointError):
        dmuon.export_weights(written / "step-1", tmp_path / target)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_the_same_as_its_copy_and_differs_from_a_later_one(written: Path) -> None:
    assert dmuon.diff_checkpoints(written / "step-1", written / "step-1").is_same
    found = dmuon.diff_checkpoints(written / "step-1", written / "step-2")
    assert not found.is_same
    assert found.only_in_a == found.only_in_b == ()
    assert found.settings["step"] == (1, 2)
    assert found.settings["extra.tokens"] == (96, 192)
    assert found.settings["optimizer.num_steps"] == (1, 2)
    ours, theirs = weights_of(written / "step-1"), weights_of(written / "step-2")
    by_name = {each.name: each for each in found.values}
    assert {"embed.weight", "momentum_buffer/layers.0.q_proj.weight"} <= by_name.keys()
    for name, value in ours.items():
        delta = (value.double() - theirs[name].double()).abs()
        scale = torch.maximum(value.double().abs(), theirs[name].double().abs())
        assert by_name[name].largest_absolute == float(delta.max())
        assert by_name[name].largest_relative == float((delta / scale).nan_to_num(0).max())
        assert by_name[name].num_different == int((delta > 0).sum())


def test_a_difference_counts_values_and_kinds_tensor_by_tensor(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    ours = {
        "same": torch.tensor([1.0, nan, inf, 0.0]),
        "nan": torch.tensor([1.0, nan]),
        "int": torch.tensor([2**62, 5]),
        "flag": torch.tensor([True, False]),
        "half": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        "shape": torch.zeros(2, 3),
        "dtype": torch.zeros(2),
        "gone": torch.zeros(1),
    }
    theirs = {
        "same": torch.tensor([1.0, nan, inf, -0.0]),
        "nan": torch.tensor([1.0, 1.0]),
        "int": torch.tensor([2**62 + 1, 5]),
        "flag": torch.tensor([True, True]),
        "half": torch.tensor([1.0, 4.0], dtype=torch.bfloat16),
        "shape": torch.zeros(3, 2),
        "dtype": torch.zeros(2, dtype=torch.int32),
        "new": torch.zeros(1),
    }
    a, b = hand_made(tmp_path / "a", 1, ours), hand_made(tmp_path / "b", 1, theirs)
    found = dmuon.diff_checkpoints(a, b)
    assert (found.only_in_a, found.only_in_b) == (("gone",), ("new",))
    assert found.other_kind.keys() == {"shape", "dtype"}
    assert found.num_compared == 5
    values = {
        v.name: (v.num_different, v.largest_absolute, v.largest_relative) for v in found.values
    }
    assert values == {
        "nan": (1, inf, inf),
        "int": (1, 1.0, 2.0**-62),
        "flag": (1, 1.0, 1.0),
        "half": (1, 2.0, 0.5),
    }


def test_chunks_of_a_tensor_are_compared_as_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dmuon.checkpoint import difference

    torch.manual_seed(0)
    a, b = torch.randn(37, 5), torch.randn(37, 5)
    paths = [hand_made(tmp_path / n, 1, {"w": w}) for n, w in (("a", a), ("b", b))]
    whole = dmuon.diff_checkpoints(*paths)
    monkeypatch.setattr(difference, "_CHUNK_VALUES", 11)
    assert dmuon.diff_checkpoints(*paths) == whole
    assert whole.values[0].num_different == 185


def test_settings_that_differ_are_named_by_path_with_both_values(tmp_path: Path) -> None:
    nan = float("nan")
    groups = [{"lr": 0.02, "names": ["w"], "betas": (0.9, 0.95), "odd": nan}]
    w = {"w": torch.zeros(2)}
    a = hand_made(
        tmp_path / "a", 1, w, optimizer=OptimizerFacts(groups, 1, {}), extra={"x": {"y": 1}}
    )
    changed = [{**groups[0], "lr": 0.01}]
    b = hand_made(tmp_path / "b", 1, w, optimizer=OptimizerFacts(changed, 1, {}))
    assert dmuon.diff_checkpoints(a, b).settings == {
        "optimizer.param_groups[0].lr": (0.02, 0.01),
        "extra.x.y": (1, "(absent)"),
        "extra": ("(absent)", {}),
    }


def test_it_does_not_matter_under_which_name_a_tied_weight_is_stored(tmp_path: Path) -> None:
    w = torch.randn(3, 2)
    a = hand_made(tmp_path / "a", 1, {"x": w}, tied={"y": "x"})
    b = hand_made(tmp_path / "b", 1, {"y": w}, tied={"x": "y"})
    save_file({"y": w}, tmp_path / "c.safetensors")
    torch.save({"x": w, "y": w + 1}, tmp_path / "d.pt")
    assert dmuon.diff_checkpoints(a, b).is_same
    plain = dmuon.diff_checkpoints(a, tmp_path / "c.safetensors")
    assert (plain.is_same, plain.weights_only, plain.num_compared) == (True, True, 1)
    untied = dmuon.diff_checkpoints(a, tmp_path / "d.pt")
    assert [each.name for each in untied.values] == ["y"]


def test_transformers_opens_what_was_exported_and_gives_equal_logits(tmp_path: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=41,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
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


def test_the_format_of_the_manifest_is_not_loosened_by_the_older_one(run: Path) -> None:
    """A manifest of ours whose ``format`` is gone is damaged, not of the platform."""
    path = run / "step-1" / manifests.MANIFEST_FILE
    path.write_text(path.read_text().replace('"format": "dmuon-checkpoint",', ""))
    with pytest.raises(dmuon.DamagedCheckpointError, match="changed since it was written"):
        dmuon.describe_checkpoint(run / "step-1")
