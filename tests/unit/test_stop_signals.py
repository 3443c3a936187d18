"""Signals at the driver, sent for real."""

import os
import signal
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
        with stopped, signals.training():
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
        with twice, signals.training():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
    assert "with a checkpoint after this step if the training has begun" in said[0]
    assert said[1:] == ["Ctrl-C: ending at once, without another checkpoint"]
