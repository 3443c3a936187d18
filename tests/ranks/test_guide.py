"""The guide for torchrun: its files and commands, run as they are printed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the hf extra")

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "dmuon" / "GUIDE.md").read_text(encoding="utf-8")


def _block(heading: str, language: str) -> str:
    (found,) = re.findall(f"<!-- {re.escape(heading)} -->\n```{language}\n(.*?)```", GUIDE, re.S)
    return str(found)


def _run(command: str, folder: Path) -> str:
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


def _losses(output: str) -> dict[int, float]:
    return {int(n): float(x) for n, x in re.findall(r"^step (\d+) loss (\S+)$", output, re.M)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[int, float]]]:
    """The folder in which the commands ran one after the other, and the losses of each."""
    folder = tmp_path_factory.mktemp("guide")
    for name in ("train.py", "load.py"):
        (folder / name).write_text(_block(f"file: {name}", "python"), encoding="utf-8")
    commands = _block("commands: train.py", "bash").splitlines()
    return folder, [_losses(_run(command, folder)) for command in commands]


def test_each_command_goes_on_where_the_last_one_stopped(
    trained: tuple[Path, list[dict[int, float]]],
) -> None:
    _, losses = trained
    assert [sorted(each) for each in losses] == [
        list(range(first, first + 20)) for first in (1, 21, 41)
    ]


def test_the_losses_are_those_of_one_process_that_was_never_stopped(
    trained: tuple[Path, list[dict[int, float]]],
) -> None:
    folder, losses = trained
    alone = _losses(_run(_ALONE, folder))
    pieces = {step: loss for each in losses for step, loss in each.items()}
    assert pieces == pytest.approx(alone, abs=2e-3)
    assert alone[60] < 0.7 * alone[1]


_ALONE = "torchrun --standalone --nproc-per-node 1 train.py --steps 60 --folder alone"


def test_the_checkpoint_opens_without_dmuon(
    trained: tuple[Path, list[dict[int, float]]],
) -> None:
    folder, _ = trained
    assert "import " in _run(_block("commands: load.py", "bash").strip(), folder)


def test_fine_tuning_begins_with_the_pretrained_loss(
    trained: tuple[Path, list[dict[int, float]]],
) -> None:
    folder, losses = trained
    script = _block("file: train.py", "python")
    begin, end = script.index("config = LlamaConfig("), script.index("optimizer = dmuon.Muon(")
    tuned = script[:begin] + _block("replace in train.py", "python") + script[end:]
    (folder / "tune.py").write_text(tuned, encoding="utf-8")
    os.symlink(folder / "checkpoints" / "step-000060", folder / "pretrained")
    first = _losses(
        _run("torchrun --standalone --nproc-per-node 2 tune.py --steps 2 --folder tuned", folder)
    )[1]
    assert first < losses[0][1] * 0.7
