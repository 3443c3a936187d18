"""Signals at the driver, sent for real."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dmuon_platform.errors import GracefulStop
from dmuon_platform.stop_request import StopFile
from dmuon_platform.stop_signals import StopSignals


def test_a_second_sigterm_while_the_first_is_written_down_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    to_disk = os.fsync

    def interrupted(descriptor: int) -> None:
        if len(said) == 1:
            signal.raise_signal(signal.SIGTERM)
        to_disk(descriptor)

    monkeypatch.setattr(os, "fsync", interrupted)
    signals = StopSignals(tmp_path, "launch", said.append)
    with signals:
        stopped = pytest.raises(GracefulStop, match="after the training")
        with stopped, signals.training(lambda: None):
            signal.raise_signal(signal.SIGTERM)
        request = StopFile(tmp_path).read("launch")
    assert request is not None, "the workers were asked to save"
    assert request.reason == "SIGTERM"
    assert len(said) == 1
    assert not list(tmp_path.iterdir())


def test_a_second_ctrl_c_ends_it_at_once_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    signals = StopSignals(tmp_path, "launch", said.append)
    with signals:
        twice = pytest.raises(KeyboardInterrupt)
        with twice, signals.training(lambda: None):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
    assert "with a checkpoint after this step if the training has begun" in said[0]
    assert said[1:] == ["Ctrl-C: ending at once, without another checkpoint"]


ON_A_TERMINAL = """
import sys, time
from pathlib import Path
from dmuon_platform.errors import GracefulStop
from dmuon_platform.output import standard_output
from dmuon_platform.stop_request import StopFile
from dmuon_platform.stop_signals import StopSignals

folder = Path(sys.argv[1])
sys.stdout = standard_output()
with StopSignals(folder, "launch", lambda text: print(text, flush=True)) as signals:
    try:
        with signals.training(lambda: None):
            (folder / "trains").touch()
            while (request := StopFile(folder).read("launch")) is None:
                print("step", flush=True)
                time.sleep(0.01)
            print("saved", flush=True)
    except GracefulStop as stopped:
        (folder / "ended").write_text(f"{request.reason}: {stopped}")
"""


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_terminal_that_closes_stops_the_run_unless_nohup_was_asked_for(
    tmp_path: Path, is_ignored: bool
) -> None:
    parent, terminal = pty.openpty()
    nohup = ["nohup"] if is_ignored else []
    child = subprocess.Popen(
        [*nohup, sys.executable, "-c", ON_A_TERMINAL, tmp_path],
        stdin=terminal,
        stdout=(tmp_path / "output").open("w") if is_ignored else terminal,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # it becomes its terminal
    )
    os.close(terminal)
    try:
        while not (tmp_path / "trains").exists():
            assert child.poll() is None
        os.close(parent)
        if is_ignored:
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(1.0)
            child.terminate()
        assert child.wait(60) == 0
    finally:
        child.kill()
    reason = "SIGTERM" if is_ignored else "SIGHUP, as its terminal is gone"
    said = (tmp_path / "ended").read_text()
    assert said.startswith(f"{reason}: Stopped by {reason} after the training.")
