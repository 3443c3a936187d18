"""Mistakes that need no process group; each is given an empty folder."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from dmuon_platform.data.documents import read_documents
from dmuon_platform.data.sources import find_files
from dmuon_platform.data.tokenizer import load_tokenizer
from dmuon_platform.errors import PlatformError, SpecError
from dmuon_platform.model.huggingface import load_local_model, read_vocab_size
from dmuon_platform.preflight import check_earlier_run, storage_explained
from dmuon_platform.spec import JobSpec, job_of
from dmuon_platform.tracking import Tracker
from provocations.commands import FIRST_RELEASE
from provocations.form import Provocation
from small_job import small

import dmuon
from dmuon import CheckpointError, DamagedCheckpointError, SetupError
from dmuon.bench.settings import Settings
from dmuon.checkpoint.assignment import assign
from dmuon.checkpoint.facts import TensorFacts
from dmuon.checkpoint.header import make_header
from dmuon.checkpoint.source import open_source
from dmuon.checkpoint.tensor_file import TensorFile


def _file(name: str, content: str | bytes, use: Callable[[Path], object]) -> Callable[[Path], Any]:
    """Something done with a file that has this content."""

    def mistake(folder: Path) -> object:
        path = folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return use(path)

    return mistake


def _saved(content: object) -> Callable[[Path], object]:
    def mistake(folder: Path) -> object:
        torch.save(content, folder / "weights.pt")
        return open_source(folder / "weights.pt")

    return mistake


def _header(content: dict[str, object]) -> Callable[[Path], object]:
    text = json.dumps(content).encode()
    return _file("x.safetensors", len(text).to_bytes(8, "little") + text, TensorFile)


def _read(path: Path) -> list[str]:
    return list(read_documents(path, "text"))


def _parquet(**columns: list[Any]) -> Callable[[Path], object]:
    def mistake(folder: Path) -> object:
        pq.write_table(pa.table(columns), folder / "x.parquet")
        return _read(folder / "x.parquet")

    return mistake


def _model(config: dict[str, object] | list[object]) -> Callable[[Path], object]:
    return _file(
        "config.json", json.dumps(config), lambda file: load_local_model(file.parent, 64, "meta")
    )


def _bench(**given: Any) -> Callable[[Path], object]:
    return lambda _: Settings(**given)


def _torch_optimizers_of_several_groups(_: Path) -> object:
    weights = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    muon = torch.optim.Muon([{"params": [weight]} for weight in weights])
    return dmuon.muon_settings_from_torch(muon, torch.optim.AdamW([torch.ones(2)]))


def _left(folder: Path, **changes: Any) -> JobSpec:
    """A job of which an earlier launch, without the changes, has left its folder."""
    earlier = job_of(small(storage=str(folder)))
    earlier.run_dir.mkdir()
    (earlier.run_dir / "job.toml").write_text(earlier.to_toml())
    return job_of(small(storage=str(folder), **changes))


def _on_a_full_disk(spec: JobSpec) -> None:
    with storage_explained(spec):
        raise OSError(errno.ENOSPC, "No space left on device")


EMPTY_TOKENIZER = json.dumps(
    {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}
)
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
        _file("x.pt", "no pickle", open_source),
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
        _file("x.safetensors", "short", TensorFile),
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
    # text, tokenizers and models of a job
    Provocation(
        _file("x.txt", b"\xff", _read),
        SpecError,
        "x.txt is not UTF-8 text (byte 0)",
        "convert it, or leave it out of the glob",
    ),
    Provocation(
        _file("x.jsonl", '{"body": "a"}', _read),
        SpecError,
        "has the fields ['body'], and no text under data.text_field = 'text'",
        "",
    ),
    Provocation(
        _parquet(body=["a"]),
        SpecError,
        "has the columns ['body'], and no data.text_field",
        "'text'",
    ),
    Provocation(
        _parquet(text=[1]),
        SpecError,
        "column 'text' of",
        "holds int64, not text; name another one",
        "with data.text_field",
    ),
    Provocation(
        _file("x.txt.gz", b"", lambda path: find_files(str(path))),
        SpecError,
        "x.txt.gz is compressed",
        "decompress it first",
    ),
    Provocation(
        lambda folder: load_tokenizer(str(folder)),
        SpecError,
        "cannot be read (Is a directory)",
        "It is 'bytes' or the path of a tokenizer.json",
    ),
    Provocation(
        lambda folder: load_local_model(folder, 64, "meta"),
        SpecError,
        "holds no config.json",
        "It must be a local folder written by save_pretrained",
        "hub names are not downloaded",
    ),
    Provocation(
        _model([]), SpecError, "config.json must hold a JSON object", "name a folder of a model"
    ),
    Provocation(
        _model({"max_position_embeddings": 32}),
        SpecError,
        "data.sequence_length is 64",
        "takes at most 32 tokens",
        "Set data.sequence_length=32 or less",
    ),
    Provocation(
        _file("config.json", "{}", lambda file: read_vocab_size(file.parent)),
        SpecError,
        "config.json names no vocab_size",
        "so it is not a language model",
    ),
    Provocation(
        _file("x.json", EMPTY_TOKENIZER, lambda file: load_tokenizer(str(file))),
        SpecError,
        "x.json' has an empty vocabulary",
        "data.tokenizer",
    ),
    # a run that is there
    Provocation(
        lambda folder: check_earlier_run(_left(folder, optimizer__lr=0.5)),
        SpecError,
        "'small' was already started in",
        "optimizer.lr: 0.02 -> 0.5",
        "Set these back to go on with that run, or give this job a name of its own",
    ),
    Provocation(
        lambda folder: _on_a_full_disk(_left(folder)),
        PlatformError,
        "The disk of",
        "is full (",
        "Make room and launch the job again",
    ),
    Provocation(
        lambda folder: Tracker(_left(folder), {}).finish("DONE"),
        ValueError,
        "not 'DONE'",
        "status must be one of FINISHED",
    ),
]
