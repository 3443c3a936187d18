"""The command line: arguments in, a table and a JSON file out, an exit code."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NoReturn

import torch

from dmuon.bench.measure import measure
from dmuon.bench.parity import tolerance
from dmuon.bench.presets import PRESETS
from dmuon.bench.public import check_installed
from dmuon.bench.ranks import Launch, RankError, num_cores, run_ranks
from dmuon.bench.report import NOTE, render
from dmuon.bench.settings import ADAMW, CONTENDERS, DMUON, OTHER_MUONS, PRECISIONS, Settings
from dmuon.bench.summary import loss_difference, scaling, summarise

DONE, FAILED, BAD_ARGUMENTS = 0, 1, 2
_WHOLE_NUMBERS = {
    "threads": "of each rank; by default the cores, shared out",
    "steps": "steps in a block; the contenders alternate block by block",
    "repeats": "rounds, each one block of every contender",
    "warmup": "untimed steps of every contender",
    "width": "of the decoder",
    "layers": "decoder blocks",
    "heads": "attention heads",
    "intermediate": "inner width of the feed-forward part",
    "vocabulary": "rows of the embedding and of the head; the data are bytes",
    "sequence": "tokens a sequence",
    "batch": "sequences a step, over all ranks",
    "seed": "of weights and data",
}
_SWITCHES = {
    "gated": "three matrices in the feed-forward part, or two",
    "weak": "--batch is of each rank: the work grows with the ranks",
    "reshard": "free weights between forward and backward",
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_ARGUMENTS, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Returns:
        0; 1 when a rank failed, a contender did not train or Muons disagree; bad arguments exit
        with 2.
    """
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    output: Path | None = given.pop("json")
    wanted_device: str = given.pop("device")
    preset: str | None = given.pop("preset")
    try:
        settings = Settings(**{**PRESETS.get(preset or "", {}), **given})
        check_installed(settings.contenders)
        device_type = _device_type(wanted_device, settings)
        _check_output(output)
    except ValueError as error:
        parser.error(str(error))
    try:
        result = run(settings, device_type)
    except RankError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return FAILED
    print(render(result, settings))
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")
    needed = ("finite", "same_start", "same_weights")
    is_good = all(run["parity"][each] for run in result["runs"] for each in needed)
    return DONE if is_good else FAILED


def run(settings: Settings, device_type: str) -> dict[str, Any]:
    """Measure with each number of ranks; the result as plain data.

    Raises:
        RankError: with the traceback of the rank that failed first.
    """
    cores = num_cores()
    load = os.getloadavg()[0]
    tolerances = {
        name: tolerance(name, settings, device_type)
        for name in settings.contenders
        if name in OTHER_MUONS
    }
    runs: list[dict[str, Any]] = []
    model: dict[str, Any] = {}
    for ranks in settings.ranks:
        threads = settings.threads or max(1, cores // ranks)
        print(f"measuring with ranks: {ranks} ...", file=sys.stderr, flush=True)
        launch = Launch(ranks, device_type, threads, settings.timeout_s)
        reports = run_ranks(launch, measure, settings, device_type)
        runs.append({"threads": threads, **summarise(reports, settings, tolerances)})
        model = asdict(reports[0].facts)
    return {
        "note": NOTE,
        "torch": torch.__version__,
        "device": device_type,
        "backend": "gloo" if device_type == "cpu" else "nccl",
        "cores": cores,
        "load": load,
        "settings": asdict(settings),
        "model": model,
        "loss_difference_between_ranks": None if settings.weak else loss_difference(runs),
        "scaling": scaling(runs),
        "runs": runs,
    }


def _parser() -> _Parser:
    """What is not given is not in the result, so that a preset can say it."""
    parser = _Parser(
        prog="python -m dmuon.bench",
        description="Whole training steps of DMuon against fully_shard + torch.optim.AdamW and "
        "other Muons, on the same model and data, alternating in one process group. " + NOTE,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    defaults = {field.name: field.default for field in fields(Settings)}
    parser.add_argument(
        "--preset", default=None, choices=tuple(PRESETS), help="a model's sizes; options override"
    )
    parser.add_argument("--ranks", type=_ranks, help="as in 1,2,4, the default")
    parser.add_argument(
        "--contenders",
        type=lambda text: tuple(text.split(",")),
        help=f"some of {','.join(CONTENDERS)} (default: {ADAMW},{DMUON})",
    )
    for name, text in _WHOLE_NUMBERS.items():
        default = "" if defaults[name] is None else f" (default: {defaults[name]})"
        parser.add_argument(f"--{name}", type=int, help=text + default)
    for name, text in _SWITCHES.items():
        shown = f"{text} (default: {'yes' if defaults[name] else 'no'})"
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=shown)
    parser.add_argument(
        "--precision", choices=PRECISIONS, help=f"of the model (default: {defaults['precision']})"
    )
    parser.add_argument(
        "--ns-dtype", choices=PRECISIONS, help="of Newton-Schulz (default: DMuon's for the device)"
    )
    parser.add_argument(
        "--timeout",
        dest="timeout_s",
        type=int,
        help=f"of a collective, seconds (default: {defaults['timeout_s']})",
    )
    parser.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="auto (the default): cuda where every rank gets its own GPU",
    )
    parser.add_argument(
        "--json", default=None, type=Path, metavar="FILE", help="write everything here"
    )
    return parser


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"takes whole numbers with commas between, as in 1,2,4; got {text!r}"
        ) from None


def _device_type(wanted: str, settings: Settings) -> str:
    num_gpus = torch.cuda.device_count()
    has_enough = num_gpus >= max(settings.ranks)
    if wanted == "cuda" and not has_enough:
        raise ValueError(
            f"--device cuda needs one GPU a rank: {max(settings.ranks)} ranks, {num_gpus} GPUs; "
            "give fewer --ranks or --device cpu"
        )
    if wanted == "auto":
        return "cuda" if has_enough else "cpu"
    return wanted


def _check_output(file: Path | None) -> None:
    if file is None:
        return
    folder = file.absolute().parent
    if file.is_dir() or not folder.is_dir():
        raise ValueError(f"--json {file} cannot be written: give a file in a folder that exists")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ValueError(f"--json {file} cannot be written: permission denied")
