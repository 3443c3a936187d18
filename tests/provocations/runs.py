"""Mistakes with what a job reads, and with runs that are there; each is given an empty folder."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from dmuon_platform.data.documents import read_documents
from dmuon_platform.data.sources import find_files
from dmuon_platform.data.tokenizer import load_tokenizer
from dmuon_platform.errors import PlatformError, SpecError
from dmuon_platform.model.huggingface import load_local_model, read_vocab_size
from dmuon_platform.preflight import check_earlier_run, storage_explained
from dmuon_platform.spec import JobSpec, job_of
from dmuon_platform.store import CheckpointStore
from dmuon_platform.tracking import Tracker
from provocations.form import Provocation, with_file
from small_job import small
from unit.stored import save


def _read(path: Path) -> list[str]:
    return list(read_documents(path, "text"))


def _parquet(**columns: list[Any]) -> Callable[[Path], object]:
    def mistake(folder: Path) -> object:
        pq.write_table(pa.table(columns), folder / "x.parquet")
        return _read(folder / "x.parquet")

    return mistake


def _model(config: dict[str, object] | list[object]) -> Callable[[Path], object]:
    return with_file(
        "config.json", json.dumps(config), lambda file: load_local_model(file.parent, 64, "meta")
    )


def _left(folder: Path, **changes: Any) -> JobSpec:
    """A job of which an earlier launch, without the changes, has left its folder."""
    earlier = job_of(small(storage=str(folder)))
    earlier.run_dir.mkdir()
    (earlier.run_dir / "job.toml").write_text(earlier.to_toml())
    return job_of(small(storage=str(folder), **changes))


def _with_checkpoint(spec: JobSpec, step: int) -> JobSpec:
    save(CheckpointStore(spec.run_dir), step)
    return spec


def _on_a_full_disk(spec: JobSpec) -> None:
    with storage_explained(spec):
        raise OSError(errno.ENOSPC, "No space left on device")


EMPTY_TOKENIZER = json.dumps(
    {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}
)

ROWS = [
    # text, tokenizers and models of a job
    Provocation(
        with_file("x.txt", b"\xff", _read),
        SpecError,
        "x.txt is not UTF-8 text (byte 0)",
        "convert it, or leave it out of the glob",
    ),
    Provocation(
        with_file("x.jsonl", '{"body": "a"}', _read),
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
        with_file("x.txt.gz", b"", lambda path: find_files(str(path))),
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
        _model({"num_hidden_layers": 10**9}),
        SpecError,
        "config.json has num_hidden_layers = 1000000000",
        "where at most 1000 can be trained here",
        "correct it",
    ),
    Provocation(
        _model({"model_type": "gpt2", "n_positions": 32}),
        SpecError,
        "data.sequence_length is 64",
        "takes at most 32 tokens (n_positions in its config.json)",
        "Set data.sequence_length=32 or less",
    ),
    Provocation(
        with_file("config.json", "{}", lambda file: read_vocab_size(file.parent)),
        SpecError,
        "config.json names no vocab_size",
        "so it is not a language model",
    ),
    Provocation(
        with_file("x.json", EMPTY_TOKENIZER, lambda file: load_tokenizer(str(file))),
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
        lambda folder: check_earlier_run(_with_checkpoint(_left(folder, train__steps=20), 30)),
        SpecError,
        "train.steps ends the run after step 20, and 'small' has done 30",
        "end it there, which exports what it has learnt, or later",
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
