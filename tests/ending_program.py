"""A training script that saves beside its training and ends before the save does.

Run as ``python ending_program.py RANK STORE FOLDER HOW`` on two ranks. ``HOW``:

- ``returns``: both ranks destroy the groups and return at once, while rank 1 still writes.
- ``returns alone``: rank 0 returns, while rank 1 is stopped in the middle of its writing.
- ``raises``: the same, but rank 0 ends with an exception.
- ``raises to a peer``: rank 0 ends with an exception while it writes, rank 1 waits for the save.
"""

import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from wrapped import make_mesh, prepare

import dmuon
from dmuon.checkpoint import background, committing

LONG, SHORT = timedelta(hours=1), timedelta(seconds=2)


def write_when(event: threading.Event) -> None:
    write = committing.write_tensors

    def write_later(*args: Any) -> Any:
        event.wait()
        return write(*args)

    committing.write_tensors = write_later


def main(rank: int, store: str, folder: Path, how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    model = prepare(make_mesh(2))
    optimizer = dmuon.Muon(model)
    may_write = threading.Event()
    if rank == (0 if how == "raises to a peer" else 1):
        write_when(may_write)
    timeout = SHORT if how == "returns alone" else LONG
    handle = dmuon.save_checkpoint(folder, model, optimizer, async_save=True, timeout=timeout)
    dist.barrier()
    if how == "returns":
        threading.Timer(1.0, may_write.set).start()
        dist.destroy_process_group()  # as scripts should
    elif rank == 0 and how.startswith("raises"):
        background.AFTER_ERROR_S = 1.0
        raise ValueError("the training has failed")
    elif rank == 1 and how == "raises to a peer":
        handle.wait()
    elif rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4])
