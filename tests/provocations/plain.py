"""Mistakes with files of weights, and with functions of numbers; each is given an empty folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provocations.commands import FIRST_RELEASE
from provocations.form import Provocation, with_file

import dmuon
from dmuon import CheckpointError, DamagedCheckpointError, SetupError
from dmuon.bench.settings import Settings
from dmuon.checkpoint.assignment import assign
from dmuon.checkpoint.facts import TensorFacts
from dmuon.checkpoint.header import make_header
from dmuon.checkpoint.source import open_source
from dmuon.checkpoint.tensor_file import TensorFile


def _saved(content: object) -> Callable[[Path], object]:
    def mistake(folder: Path) -> object:
        torch.save(content, folder / "weights.pt")
        return open_source(folder / "weights.pt")

    return mistake


def _header(content: dict[str, object]) -> Callable[[Path], object]:
    text = json.dumps(content).encode()
    return with_file("x.safetensors", len(text).to_bytes(8, "little") + text, TensorFile)


def _bench(**given: Any) -> Callable[[Path], object]:
    return lambda _: Settings(**given)


def _torch_optimizers_of_several_groups(_: Path) -> object:
    weights = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    muon = torch.optim.Muon([{"params": [weight]} for weight in weights])
    return dmuon.muon_settings_from_torch(muon, torch.optim.AdamW([torch.ones(2)]))


_SPAN = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}

ROWS = [
    # paths of checkpoints
    Provocation(
        lambda _: dmuon.verify_checkpoint(None),
        SetupError,
        "got None",
        "the path of a checkpoint must be text or a pathlib.Path",
    ),
    Provocation(
        lambda folder: dmuon.verify_checkpoint(folder),
        DamagedCheckpointError,
        "it has no manifest.json",
        "so it is none, or writing it was never finished",
        "use another one, or copy it again",
    ),
    Provocation(
        lambda folder: dmuon.read_manifest(str(folder / "no")),
        DamagedCheckpointError,
        "no is not a whole checkpoint: it has no manifest.json, as there is no folder",
        "use another one",
    ),
    Provocation(
        lambda folder: dmuon.describe_checkpoint(folder / "no"),
        CheckpointError,
        "no: there is no such folder",
        "give the folder of a checkpoint",
    ),
    Provocation(
        lambda folder: dmuon.list_checkpoints(folder / "no"),
        CheckpointError,
        "no: there is no such folder",
        "give the folder that checkpoints were saved in",
    ),
    Provocation(
        lambda folder: dmuon.list_checkpoints(folder, newest=0),
        ValueError,
        "got 0",
        "newest must be a whole number of at least 1",
    ),
    Provocation(
        lambda folder: dmuon.export_weights(folder, folder / "new", max_shard_bytes="1GB"),
        SetupError,
        "got '1GB'",
        "max_shard_bytes must be a whole number of at least 1",
    ),
    Provocation(
        lambda folder: dmuon.export_weights(folder, folder / ".."),
        CheckpointError,
        "it is there already",
        "nothing is overwritten",
        "give a new path",
    ),
    # files of weights
    Provocation(
        with_file("x.pt", "no pickle", open_source),
        CheckpointError,
        "it is damaged, or holds more than tensors",
        "which is not run",
        "save model.state_dict() alone",
    ),
    Provocation(
        _saved([1]), CheckpointError, "it holds a list", "no state dict", "save model.state_dict()"
    ),
    Provocation(
        _saved({"a": torch.ones(2).to_sparse()}),
        CheckpointError,
        "'a' in it is torch.sparse_coo torch.float32",
        ", which cannot be read",
    ),
    Provocation(
        with_file("x.safetensors", "short", TensorFile),
        DamagedCheckpointError,
        "no header of",
        "bytes can be in a file of 5",
        "use another one, or copy it again",
    ),
    Provocation(
        _header({"a": _SPAN}),
        DamagedCheckpointError,
        "its tensors end at",
        ", but it has",
        "copy it again",
    ),
    Provocation(
        _header({"a": {**_SPAN, "data_offsets": [0]}}),
        DamagedCheckpointError,
        "the data_offsets of 'a' are not two: (0,)",
        "copy it again",
    ),
    Provocation(
        _header({"a": {**_SPAN, "data_offsets": [0, 4]}}),
        DamagedCheckpointError,
        "is not the 8 bytes of its shape [2]",
        "or not right after the tensor before it",
        "copy it again",
    ),
    Provocation(
        _header({"a": {**_SPAN, "dtype": "F3"}}),
        DamagedCheckpointError,
        "the dtype 'F3'",
        "is not one of",
        "copy it again",
    ),
    Provocation(
        lambda _: make_header({"__metadata__": TensorFacts("F32", (1,))}),
        ValueError,
        "no tensor can be called",
        "__metadata__",
    ),
    Provocation(
        lambda _: assign([], 0),
        SetupError,
        "num_writers=0",
        "a checkpoint needs at least one writer",
    ),
    Provocation(
        lambda _: open_source(FIRST_RELEASE).read("no"),
        CheckpointError,
        "it has no weight 'no'",
        "",
    ),
    # functions of numbers
    Provocation(
        lambda _: dmuon.newton_schulz(torch.ones(2, 2, dtype=torch.complex64)),
        ValueError,
        "got torch.complex64",
        "newton_schulz needs real numbers",
    ),
    Provocation(
        lambda _: dmuon.newton_schulz(torch.ones(2, 2), dtype=torch.int8),
        ValueError,
        "got torch.int8",
        "dtype must be a floating-point torch.dtype or None",
    ),
    Provocation(
        lambda _: dmuon.newton_schulz(torch.ones(2, 2), eps=0),
        ValueError,
        "eps must be above 0, got 0",
        "",
    ),
    Provocation(
        lambda _: dmuon.newton_schulz(torch.ones(2, 2), coefficients=[]),
        ValueError,
        "ns_coefficients is empty",
        "give one (a, b, c), or one a step",
    ),
    Provocation(
        _torch_optimizers_of_several_groups,
        SetupError,
        "muon_settings_from_torch reads optimizers of one group each",
        "for several, give dmuon.Muon(model, param_groups=[...]) their settings",
    ),
    Provocation(
        lambda _: dmuon.Cluster("h100", latency=2),
        SetupError,
        "got 2",
        "latency is in seconds, 0 to 1",
    ),
    Provocation(
        lambda _: dmuon.Workload(1, flops_per_token=-1),
        SetupError,
        "got -1",
        "flops_per_token must be 0 or more",
    ),
    Provocation(_bench(ranks=(2, 2)), ValueError, "2,2", "--ranks names a number twice"),
    Provocation(_bench(ranks=(0,)), ValueError, "got '0'", "--ranks takes numbers of at least 1"),
    Provocation(_bench(precision="int8"), ValueError, "got int8", "--precision is one of float32"),
    Provocation(_bench(ns_dtype="int8"), ValueError, "got int8", "--ns-dtype is one of float32"),
]
