"""What a document prints as a file or a command, taken out of it and run as it stands."""

import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import torch._dynamo  # FSDP2 imports it lazily; forked ranks inherit it for free
import torch.multiprocessing as mp

ROOT = Path(__file__).parents[1]
torch.set_num_threads(1)  # a forked child must not inherit a live OpenMP pool


def block(document: str, heading: str, language: str) -> str:
    """The one block of that document under ``<!-- heading -->``."""
    text = (ROOT / document).read_text(encoding="utf-8")
    (found,) = re.findall(f"<!-- {re.escape(heading)} -->\n```{language}\n(.*?)```", text, re.S)
    return str(found)


def run(command: str, folder: Path) -> str:
    """Run a printed command in new processes; return what it printed."""
    program, *arguments = shlex.split(command)
    ours = {"torchrun": ["-m", "torch.distributed.run"], "python": []}[program]
    done = subprocess.run(
        [sys.executable, *ours, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run_forked(command: str, folder: Path) -> str:
    """Do what `run` does with ``torchrun``, on forks of this process, which has imported all."""
    arguments = shlex.split(command)
    script = next(index for index, word in enumerate(arguments) if word.endswith(".py"))
    num_ranks = int(arguments[arguments.index("--nproc-per-node") + 1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("fork")
    ranks = [
        context.Process(target=_rank, args=(rank, num_ranks, port, folder, arguments[script:]))
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(timeout=300)
    finally:
        for process in ranks:
            process.kill()
    outputs = [(folder / f"rank{rank}.txt").read_text() for rank in range(num_ranks)]
    assert [process.exitcode for process in ranks] == [0] * num_ranks, "\n".join(outputs)[-6000:]
    return outputs[0]


def _rank(rank: int, num_ranks: int, port: int, folder: Path, argv: list[str]) -> None:
    os.chdir(folder)
    output = os.open(f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    sys.argv = argv
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def losses_of(output: str) -> dict[int, float]:
    """Of each step that was printed."""
    return {int(n): float(x) for n, x in re.findall(r"^step (\d+) loss (\S+)$", output, re.M)}
