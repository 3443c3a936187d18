"""What is never saved, and how two trainings are told apart."""

import pytest
import torch
from dmuon_platform.errors import Diverged, SpecError
from dmuon_platform.saving import check_dataset, check_finite, weights_digest
from dmuon_platform.store import Checkpoint
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


def test_the_digest_knows_values_names_and_shapes_and_not_the_order():
    one, two = torch.arange(4.0), torch.zeros(())
    digest = weights_digest({"a": one, "b": two})
    assert weights_digest({"b": two, "a": one}) == digest
    assert weights_digest({"a": one, "c": two}) != digest
    assert weights_digest({"a": one.view(2, 2), "b": two}) != digest
    assert weights_digest({"a": one, "b": -two}) != digest, "negative zero is another bit"
