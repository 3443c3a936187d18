"""What is never saved, and how two trainings are told apart."""

import pytest
import torch
from dmuon_platform.errors import Diverged, SpecError
from dmuon_platform.saving import check_dataset, check_finite
from dmuon_platform.store import Checkpoint
from dmuon_platform.weights_digest import digest_of_checkpoint, weights_digest
from unit.stored import MODEL_FILE, weights, write_parts

import dmuon


def test_weights_that_are_not_finite_are_never_saved():
    with pytest.raises(Diverged, match="bad"):
        check_finite(3, ["bad", "worse"])
    check_finite(3, [])


def test_a_run_does_not_go_on_with_other_data(tmp_path):
    folder = tmp_path / "step-00000010"
    extra = {"dataset_digest": "a" * 64}
    write_parts(folder, 10, {MODEL_FILE: weights()}, extra=extra)
    checkpoint = Checkpoint(folder, dmuon.read_manifest(folder))
    check_dataset(checkpoint, "a" * 64)
    with pytest.raises(SpecError, match="name") as caught:
        check_dataset(checkpoint, "b" * 64)
    assert "a" * 64 in str(caught.value)
    assert "b" * 64 in str(caught.value)


def digest(tensors: dict[str, torch.Tensor]) -> str:
    return weights_digest(tensors, tensors.__getitem__)


def test_the_digest_knows_values_names_and_shapes_and_not_the_order():
    one, two = torch.arange(4.0), torch.zeros(())
    expected = digest({"a": one, "b": two})
    assert digest({"b": two, "a": one}) == expected
    assert digest({"a": one, "c": two}) != expected
    assert digest({"a": one.view(2, 2), "b": two}) != expected
    assert digest({"a": one, "b": -two}) != expected, "negative zero is another bit"


def test_the_digest_of_a_checkpoint_is_that_of_its_weights_however_they_lie_in_files(tmp_path):
    tensors = {**weights(), "half.weight": torch.ones(3).bfloat16()}
    names = sorted(tensors)
    files = {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in names[:1]},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in names[1:]},
        "optim-00001-of-00001.safetensors": {"exp_avg/x": torch.ones(2)},
    }
    tied = {"head.weight": names[0]}
    write_parts(tmp_path / "step-00000001", 1, files, tied=tied)
    checkpoint = Checkpoint(
        tmp_path / "step-00000001", dmuon.read_manifest(tmp_path / "step-00000001")
    )
    tensors["head.weight"] = tensors[names[0]]
    assert digest_of_checkpoint(checkpoint) == digest(tensors)
