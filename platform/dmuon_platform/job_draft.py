"""``dmuon init``: a first job file for somebody's data and hardware, with a comment on each key."""

import argparse
import glob
import os
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmuon_platform.durable_file import write_whole
from dmuon_platform.errors import SpecError
from dmuon_platform.spec import JobSpec, job_of, load_job
from dmuon_platform.spec.fields import field_at, meaning
from dmuon_platform.spec.toml import toml_value

_WIDTH = 100
_MOST_CPU_WORKERS = 4
Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Hardware:
    """What a job is written for.

    Attributes:
        num_workers: One a GPU, or as many processes as share the cores.
        cores: CPU cores of one worker.
        has_gpus: Whether each worker has a GPU.
    """

    num_workers: int
    cores: int
    has_gpus: bool


def run(arguments: argparse.Namespace) -> int:
    """Write the file and say what comes next; returns 0.

    Raises:
        SpecError: The file is there already, or nothing matches the data.
    """
    target = Path(arguments.file)
    if target.suffix != ".toml":
        raise SpecError(f"{target} does not end in .toml, and TOML is written; rename it.")
    if target.exists():
        raise SpecError(f"{target} is there already; give another file, or move it away.")
    if not target.parent.is_dir():
        raise SpecError(f"{target} cannot be written: there is no folder {target.parent}.")
    hardware = _hardware(arguments.workers)
    text = draft(
        target.stem,
        hardware,
        arguments.data,
        arguments.tokenizer,
        model=arguments.model,
        text_field=arguments.text_field,
    )
    write_whole(target, text)
    spec = load_job(target, [])  # what is written is right, or we are told now
    kind = "GPUs" if hardware.has_gpus else "CPU workers"
    print(f"Wrote {target} for {hardware.num_workers} {kind}. Next:\n")
    quoted = shlex.quote(str(target))
    print(f"  dmuon validate {quoted}\n  dmuon run {quoted}\n")
    print(f"or, on a Ray cluster, dmuon submit {quoted} --address http://HOST:8265")
    _tell_short_text(spec)
    return 0


def _tell_short_text(spec: JobSpec) -> None:
    from dmuon_platform.data import check_size, measure_data

    try:
        info = measure_data(spec.data)
        if info is not None:
            check_size(info, spec.train.global_batch_size)
    except SpecError as error:
        print(f"\nEach of them will refuse it as it stands: {error}")


def draft(
    name: str,
    hardware: Hardware,
    data: Sequence[str] | None,
    tokenizer: str | None,
    model: str | None = None,
    text_field: str | None = None,
) -> str:
    """Return a job file as TOML, each key with the comment that its class has.

    Args:
        name: Of the run; characters that a name cannot have become ``-``.
        hardware: What it is for.
        data: Files or globs of text, JSONL or Parquet; None: Python's own library.
        tokenizer: A ``tokenizer.json`` or ``bytes``; None: one token a byte, or the model's own.
        model: A Hugging Face folder to fine-tune; None: a model from scratch.
        text_field: Of JSONL or Parquet; None: the only one with text, or ``text``.

    Raises:
        SpecError: Nothing matches ``data``, its text is under no or many names, or there is no
            such tokenizer or whole model, or they do not go together.
    """
    for each in data or ():
        if not any(map(os.path.isfile, glob.iglob(each, recursive=True))):
            raise SpecError(
                f"No file matches --data {each!r}; name text files, or globs such as 'texts/*.txt'."
            )
    if tokenizer not in (None, "bytes") and not Path(tokenizer).is_file():
        raise SpecError(f"There is no tokenizer {tokenizer!r}; give a model's tokenizer.json.")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "first"
    sections: Sections = {
        **(_on_gpus(hardware) if hardware.has_gpus else _on_cpu(hardware)),
        "data": {
            "source": _source(data),
            **_text_field(data, text_field),
            "tokenizer": tokenizer or "bytes",
            "sequence_length": 1024 if hardware.has_gpus else 128,
        },
    }
    if model is None:
        sections["model"]["vocab_size"] = 256 if tokenizer is None else _vocabulary(Path(tokenizer))
    else:
        sections |= _fine_tuned(model, tokenizer, sections)
    job_of({"name": name, **sections})
    return "\n".join(_lines(name, hardware, sections))


def _fine_tuned(model: str, tokenizer: str | None, drafted: Sections) -> Sections:
    """The sections that a trained model changes: sizes and tokenizer are its own, rates a tenth."""
    from dmuon_platform.model.huggingface import read_config
    from dmuon_platform.model.positions import stated_positions
    from dmuon_platform.model.weights import check_weights

    longest = stated_positions(read_config(Path(model)))
    check_weights(Path(model))
    data = dict(drafted["data"])
    _check_tokenizer(model, tokenizer)
    if tokenizer is None:
        del data["tokenizer"]
    if longest is not None:
        data["sequence_length"] = min(longest, data["sequence_length"])
    rates = {
        key: float(f"{value / 10:.6g}")  # 0.003 / 10 is 0.00030000000000000003
        for key, value in drafted["optimizer"].items()
        if key.endswith("lr")
    }
    return {
        "model": {"path": model},
        "data": data,
        "optimizer": {**drafted["optimizer"], **rates},
    }


def _check_tokenizer(model: str, tokenizer: str | None) -> None:
    from dmuon_platform.data import tokenizer as tokenizers
    from dmuon_platform.model.huggingface import read_vocab_size

    folder = Path(model)
    if tokenizer is None:
        tokenizers.check_has_tokenizer(folder)
        return
    loaded = tokenizers.load_tokenizer(tokenizer)
    tokenizers.check_vocabulary(tokenizer, loaded, read_vocab_size(folder), model)
    tokenizers.check_pretrained(tokenizer, loaded, folder)


def _source(data: Sequence[str] | None) -> str | list[str]:
    if not data:
        return "python-stdlib"
    return data[0] if len(data) == 1 else list(data)


def _text_field(data: Sequence[str] | None, named: str | None) -> dict[str, str]:
    """The key that says where the text of each record is; none where it is under its default."""
    from dmuon_platform.data.documents import text_fields
    from dmuon_platform.data.sources import find_files

    found = ((file, text_fields(file)) for file in (find_files(data) if data else ()))
    file, fields = next(((file, fields) for file, fields in found if fields is not None), ("", []))
    if not file:
        if named is not None:
            raise SpecError(
                f"--text-field {named!r} is for JSONL and Parquet, and --data names none; leave "
                "it out."
            )
        return {}
    only = fields[0] if len(fields) == 1 else "text"
    wanted = named or only
    if wanted not in fields:
        raise SpecError(
            f"--data: the first records of {file} have text under {fields or 'no field'}; "
            "name the one that holds the documents: --text-field FIELD (data.text_field in a job)."
        )
    return {} if wanted == "text" else {"text_field": wanted}


def _hardware(workers: int | None) -> Hardware:
    import torch

    cores = os.cpu_count() or 1
    gpus = torch.cuda.device_count()
    num_workers = workers or gpus or min(_MOST_CPU_WORKERS, max(1, cores))
    return Hardware(num_workers, max(1, cores // num_workers), gpus > 0)


def _on_cpu(hardware: Hardware) -> Sections:
    return {
        "model": _sizes(128, 352, 4, 4),
        "train": _batch(hardware, 8, steps=300),
        "optimizer": {"lr": 0.02, "adamw_lr": 0.003},
        "schedule": {"kind": "wsd", "warmup_steps": 20},
        "evaluation": {"every": 100},
        "checkpoint": {"every": 50},
        "resources": {"workers": hardware.num_workers, "cpus_per_worker": hardware.cores},
    }


def _on_gpus(hardware: Hardware) -> Sections:
    """The sizes of GPT-2 small and, as Hoffmann et al. 2022 found, 20 tokens a parameter."""
    batch = _batch(hardware, 16, tokens=2_500_000_000)
    return {
        "model": _sizes(768, 2048, 12, 12),
        "train": {**batch, "precision": "bfloat16", "compile": True},
        "optimizer": {"lr": 0.02, "weight_decay": 0.1, "adamw_lr": 0.002},
        "schedule": {"kind": "wsd", "warmup_steps": 500},
        "evaluation": {"every": 500},
        "checkpoint": {"every": 500},
        "resources": {
            "workers": hardware.num_workers,
            "cpus_per_worker": hardware.cores,
            "gpus_per_worker": 1,
        },
    }


def _sizes(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "vocab_size": 256,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


def _batch(hardware: Hardware, micro_batch: int, **length: int) -> dict[str, Any]:
    return {
        **length,
        "global_batch_size": micro_batch * hardware.num_workers,
        "micro_batch_size": micro_batch,
    }


def _vocabulary(tokenizer: Path) -> int:
    from dmuon_platform.data.tokenizer import load_tokenizer

    size: int = load_tokenizer(str(tokenizer)).vocab_size
    return -(-size // 64) * 64  # matrix units like multiples of 64


def _lines(name: str, hardware: Hardware, sections: Sections) -> Iterator[str]:
    kind = "GPUs" if hardware.has_gpus else "workers on the CPU"
    yield f"# A job for {hardware.num_workers} {kind}, made by `dmuon init`. Keys that are not here"
    yield "# have their defaults; `dmuon schema --markdown` explains all of them."
    yield ""
    yield from _commented(["name"], name)
    yield from _commented(["storage"], "runs")
    for section in JobSpec.model_fields:
        if section in sections:
            yield f"\n[{section}]"
            for key, value in sections[section].items():
                yield from _commented([section, key], value)
    yield ""


def _commented(path: list[str], value: Any) -> Iterator[str]:
    field = field_at(path)
    assert field is not None  # sections are checked before
    words = meaning(field.description)
    yield from textwrap.wrap(words, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    yield f"{path[-1]} = {toml_value(value)}"
