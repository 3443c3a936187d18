"""Real text that is always there: the source of Python's own library, as bytes."""

import sysconfig
from pathlib import Path

import torch

_ENOUGH_BYTES = 2**20


def load_text(at_least: int) -> torch.Tensor:
    """The first megabyte or so of the standard library's modules in the order of their names.

    Raises:
        RuntimeError: when this interpreter keeps too little source on disk.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for file in sorted(folder.glob("*.py")):
        text += file.read_bytes()
        if len(text) >= max(_ENOUGH_BYTES, at_least):
            return torch.frombuffer(text, dtype=torch.uint8)
    raise RuntimeError(
        f"{folder} holds {len(text)} bytes of Python source and {max(_ENOUGH_BYTES, at_least)} "
        "are needed; use an interpreter that has its standard library as files"
    )


def rows_of(text: torch.Tensor, step: int, batch: int, sequence: int) -> torch.Tensor:
    """The ``batch x (sequence + 1)`` bytes of one step, a pure function of its arguments."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - sequence, (batch, 1), generator=generator)
    return text[starts + torch.arange(sequence + 1)].long()
