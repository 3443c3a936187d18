"""``dmuon doctor`` sees what is broken on this real machine, and says what to do about it."""

import json
import socket
from pathlib import Path

import pytest
from dmuon_platform import cli, doctor, machine_checks
from dmuon_platform.finding import Finding, State


def _findings(
    storage: Path, address: str | None = None, uri: str | None = None
) -> dict[str, Finding]:
    return {finding.about: finding for finding in doctor.examine(storage, address, uri)}


@pytest.fixture
def dead_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


def test_this_machine_can_train_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--storage", str(tmp_path / "runs" / "deep"), "--json"]) == 0
    found = {each["about"]: each for each in json.loads(capsys.readouterr().out)}
    assert {"packages", "backend", "storage", "storage speed", "storage locks"} <= found.keys()
    assert "torch 2" in found["packages"]["seen"]
    assert found["storage locks"]["seen"] == "renames and locks work"
    assert list(tmp_path.iterdir()) == []


def test_a_storage_that_cannot_be_written_is_broken(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert _findings(file)["storage"].state is State.BROKEN
    assert "--storage" in _findings(Path("/proc/runs"))["storage"].fix


def test_services_that_do_not_answer_are_named_with_the_way_out(
    tmp_path: Path, dead_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    host = f"127.0.0.1:{dead_port}"
    found = _findings(tmp_path, f"http://{host}", f"http://{host}")
    assert found["Ray job server"].state is State.BROKEN
    assert found["MLflow"].state is State.POOR  # training runs without it
    assert _findings(tmp_path, host)["Ray"].state is State.BROKEN
    assert _findings(tmp_path, "head")["Ray"].seen == "'head' is no address"
    ray_client = f"ray://{host}"  # which jobs refuse
    assert _findings(tmp_path, ray_client)["Ray"].seen == f"{ray_client!r} is no address"
    assert cli.main(["doctor", "--storage", str(tmp_path), "--address", host]) == doctor.FAILED
    assert f"ray start --head --port={dead_port}" in capsys.readouterr().out


def test_a_package_that_is_missing_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=99", "no-such-package", "also-missing; extra == 'hf'", "numpy>=1"]
    monkeypatch.setattr(machine_checks.metadata, "requires", lambda _name: wanted)
    finding = next(each for each in machine_checks.check_machine() if each.about == "packages")
    assert finding.state is State.BROKEN
    assert "is not >=99; no-such-package is missing (" in finding.seen
