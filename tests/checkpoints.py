"""What checkpoint tests share: states to compare, and files whose writing is held back."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import dmuon
from dmuon.checkpoint import committing
from dmuon.checkpoint.snapshot import Snapshot


def flat(state: object, path: str = "") -> dict[str, Any]:
    """Everything in a nested dict by its path; groups and counters too."""
    if isinstance(state, dict):
        return {k: v for key, item in state.items() for k, v in flat(item, f"{path}/{key}").items()}
    return {path: state}


def assert_same(ours: object, theirs: object, where: str = "") -> None:
    ours, theirs = flat(ours), flat(theirs)
    assert ours.keys() == theirs.keys(), where
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert ours[name].dtype == value.dtype, f"{name} {where}"
            assert torch.equal(ours[name], value), f"{name} {where}"
        else:
            assert ours[name] == value, f"{name} {where}"


def states(model: nn.Module, optimizer: dmuon.Muon) -> dict[str, dict[str, Any]]:
    """Weights and state of the optimizer. Collective over the mesh."""
    return {
        "model": dmuon.get_model_state_dict(model),
        "optimizer": dmuon.get_optimizer_state_dict(model, optimizer),
    }


@contextmanager
def writing_held() -> Iterator[threading.Event]:
    """Files are written, by the real thing, once the event is set."""
    with _held(committing, "write_tensors") as event:
        yield event


@contextmanager
def copying_held() -> Iterator[threading.Event]:
    """Live tensors are copied, by the real thing, once the event is set."""
    with _held(Snapshot, "take") as event:
        yield event


@contextmanager
def _held(where: Any, name: str) -> Iterator[threading.Event]:
    event, do = threading.Event(), getattr(where, name)

    def do_later(*args: Any) -> Any:
        assert event.wait(60)
        return do(*args)

    setattr(where, name, do_later)
    try:
        yield event
    finally:
        event.set()
        setattr(where, name, do)
