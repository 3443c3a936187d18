"""Values of options, refused in plain words: argparse would name our functions instead."""

import argparse
import threading
from collections.abc import Sequence
from typing import Any


class Once(argparse.Action):
    """Keeps a list with commas, and refuses a second one: the first would be lost in silence."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Keep it."""
        if getattr(namespace, self.dest) is not self.default:
            raise argparse.ArgumentError(self, "is given twice; write one list, with commas")
        setattr(namespace, self.dest, values)


def number(text: str) -> float:
    """Read a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


def seconds(text: str) -> float:
    """Read a time that one can sleep for."""
    value = number(text)
    if not 0 < value <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
    return value


def whole(text: str) -> int:
    """Read a whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None


def count(text: str) -> int:
    """Read a whole number of at least 1."""
    value = whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return value
