"""What differs between two checkpoints, tensor by tensor and setting by setting."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from saved import hand_made, weights_of, write_checkpoints

import dmuon
from dmuon.checkpoint.manifest import OptimizerFacts


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_checkpoints(folder)
    return folder


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
    is_state = ["/" in each.name for each in found.values]
    assert is_state == sorted(is_state), "weights come before the optimizer's tensors"
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
