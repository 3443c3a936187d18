"""The arguments of ``dmuon sweep``; imports next to nothing, so that help is there at once."""

import argparse
from pathlib import Path

from dmuon_platform import option_values as read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all but those that every command on a job has."""
    parser.epilog = (
        "Each training is one process without Ray. Run again, the command goes on with those that "
        "are left."
    )
    parser.add_argument(
        "--grid",
        action="append",
        nargs="+",
        required=True,
        metavar="KEY=VALUE,...",
        help="values to try; every combination is run. Several times: each grid has its own best",
    )
    parser.add_argument(
        "--seeds",
        action=read.Once,
        type=_numbers,
        default=[0],
        metavar="N,...",
        help="of each setting; default: 0",
    )
    parser.add_argument("--parallel", type=read.count, default=1, help="at a time; default: 1")
    parser.add_argument("--output", type=Path, help="a folder; default: NAME-sweep in the storage")


def _numbers(text: str) -> list[int]:
    numbers = [read.whole(number) for number in text.split(",")]
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"must be different numbers, not {text!r}")
    return numbers
