"""One number for all weights of a model: equal where every bit is."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from safetensors import safe_open
from torch import Tensor

from dmuon_platform.export import model_files
from dmuon_platform.store import Checkpoint


def digest_of_checkpoint(checkpoint: Checkpoint) -> str:
    """Return `weights_digest` of a checkpoint's model; one weight at a time is in memory.

    It depends neither on the ranks that wrote the checkpoint nor on its files.
    """
    with _weights(checkpoint) as (names, read):
        return weights_digest(names, read)


def nonfinite_in(checkpoint: Checkpoint) -> list[str]:
    """Return the names of a checkpoint's weights that are infinite or not a number."""
    with _weights(checkpoint) as (names, read):
        return [name for name in names if not torch.isfinite(read(name)).all()]


@contextmanager
def _weights(checkpoint: Checkpoint) -> Iterator[tuple[list[str], Callable[[str], Tensor]]]:
    """Give the names of all weights, and what reads one."""
    manifest = checkpoint.manifest
    with ExitStack() as stack:
        reader_of = {}
        for file in model_files(manifest):
            if file in manifest.tensors:
                reader = stack.enter_context(safe_open(checkpoint.path / file, framework="pt"))
                reader_of.update(dict.fromkeys(manifest.tensors[file], reader))

        def read(name: str) -> Tensor:
            kept = manifest.tied.get(name, name)
            return reader_of[kept].get_tensor(kept)

        yield [*reader_of, *manifest.tied], read


def weights_digest(names: Iterable[str], read: Callable[[str], Tensor]) -> str:
    """Return the SHA-256 over names, shapes, dtypes and bytes of all weights, in order of name."""
    digest = hashlib.sha256()
    for name in sorted(names):
        tensor = read(name).detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
