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
from dmuon.bench.ranks import Launch, RankError, run_ranks
from dmuon.bench.report import NOTE, render
from dmuon.bench.settings import PRECISIONS, Settings
from dmuon.bench.summary import loss_difference, summarise

DONE, FAILED, BAD_ARGUMENTS = 0, 1, 2
_HELP = {
    "steps": "steps in a block; the contenders alternate block by block",
    "repeats": "rounds, each one block of either contender",
    "warmup": "untimed steps of either contender",
    "width": "of the decoder",
    "layers": "decoder blocks",
    "heads": "attention heads",
    "intermediate": "inner width of the feed-forward part",
    "sequence": "tokens a sequence",
    "batch": "sequences a step, over all ranks",
    "seed": "of weights and data",
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_ARGUMENTS, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Returns:
        0; 1 when a rank failed or a contender did not train; bad arguments exit with 2.
    """
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    output: Path | None = given.pop("json")
    wanted_device: str = given.pop("device")
    try:
        settings = Settings(**given)
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
    trained = all(r["parity"]["finite"] and r["parity"]["same_start"] for r in result["runs"])
    return DONE if trained else FAILED


def run(settings: Settings, device_type: str) -> dict[str, Any]:
    """Measure with each number of ranks; the result as plain data.

    Raises:
        RankError: with the traceback of the rank that failed first.
    """
    cores = _num_cores()
    runs: list[dict[str, Any]] = []
    model: dict[str, Any] = {}
    for ranks in settings.ranks:
        threads = max(1, cores // ranks)
        print(f"measuring with ranks: {ranks} ...", file=sys.stderr, flush=True)
        launch = Launch(ranks, device_type, threads, settings.timeout_s)
        reports = run_ranks(launch, measure, settings, device_type)
        runs.append({"threads": threads, **summarise(reports, settings)})
        model = asdict(reports[0].facts)
    return {
        "note": NOTE,
        "torch": torch.__version__,
        "device": device_type,
        "backend": "gloo" if device_type == "cpu" else "nccl",
        "cores": cores,
        "settings": asdict(settings),
        "model": model,
        "loss_difference_between_ranks": loss_difference(runs),
        "runs": runs,
    }


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m dmuon.bench",
        description="Whole training steps of DMuon against fully_shard + torch.optim.AdamW, on "
        "the same model and data, alternating in one process group. " + NOTE,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    defaults = {field.name: field.default for field in fields(Settings)}
    parser.add_argument("--ranks", type=_ranks, default=(1, 2, 4), help="as in 1,2,4")
    for name, text in _HELP.items():
        parser.add_argument(f"--{name}", type=int, default=defaults[name], help=text)
    parser.add_argument(
        "--precision", default=defaults["precision"], choices=PRECISIONS, help="of the model"
    )
    parser.add_argument(
        "--reshard",
        action=argparse.BooleanOptionalAction,
        default=defaults["reshard"],
        help="free weights between forward and backward",
    )
    parser.add_argument(
        "--timeout",
        dest="timeout_s",
        type=int,
        default=defaults["timeout_s"],
        help="of a collective, seconds",
    )
    parser.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="auto: cuda where every rank gets its own GPU",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here")
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


def _num_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
