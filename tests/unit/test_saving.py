"""What is never saved, and how two trainings are told apart."""

import pytest
import torch
from dmuon_platform.errors import Diverged
from dmuon_platform.saving import check_finite, weights_digest


def test_weights_that_are_not_finite_are_never_saved():
    weights = {"good": torch.ones(2), "bad": torch.tensor([1.0, float("inf")])}
    with pytest.raises(Diverged, match="bad"):
        check_finite(3, weights)
    check_finite(3, {"good": weights["good"]})


def test_the_digest_knows_values_names_and_shapes_and_not_the_order():
    one, two = torch.arange(4.0), torch.zeros(())
    digest = weights_digest({"a": one, "b": two})
    assert weights_digest({"b": two, "a": one}) == digest
    assert weights_digest({"a": one, "c": two}) != digest
    assert weights_digest({"a": one.view(2, 2), "b": two}) != digest
    assert weights_digest({"a": one, "b": -two}) != digest, "negative zero is another bit"
