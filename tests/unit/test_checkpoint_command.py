"""``dmuon checkpoint``: what it prints, and with which exit code it ends."""

import json
import re
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from dmuon_platform import cli
from saved import cut, flip, hand_made, write_checkpoints

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_checkpoints(folder)
    return folder


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(written, tmp_path / "run"))


class Command:
    """Runs the command and keeps what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: object) -> int:
        code = cli.main(["checkpoint", *map(str, arguments)])
        self.out, self.err = self._capsys.readouterr()
        return code

    def json(self, *arguments: object) -> tuple[int, Any]:
        code = self(*arguments, "--json")
        return code, json.loads(self.out, parse_constant=pytest.fail)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def test_list_shows_steps_times_and_sizes(written: Path, command: Command) -> None:
    assert command("list", written) == 0
    head, first, second = command.out.splitlines()
    assert head.split() == ["NAME", "STEP", "CREATED", "MIB", "OPTIMIZER"]
    name, step, created, mib, optimizer = second.split()
    assert (first.split()[0], name, step, optimizer) == ("step-1", "step-2", "2", "yes")
    size = sum(each.stat().st_size for each in (written / "step-2").iterdir())
    assert mib == f"{size / 2**20:.2f}"
    for action in ("show", "verify"):
        assert command(action, written / "step-2") == 0
        assert f"{mib} MiB" in command.out
    assert datetime.fromisoformat(created).tzinfo is not None


def test_list_of_a_run_is_that_of_its_checkpoints(run: Path, command: Command) -> None:
    folder = run.parent / "mine"
    shutil.copytree(run, folder / "checkpoints")
    shutil.copytree(run / "step-1", folder / "export")
    (folder / "export" / "manifest.json").unlink()
    (folder / "job.toml").touch()
    assert command("list", folder) == 0
    assert [line.split()[0] for line in command.out.splitlines()] == ["NAME", "step-1", "step-2"]


def test_the_name_of_a_run_is_answered_with_its_folder(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, tmp_path / "runs" / "mine" / "checkpoints")
    (tmp_path / "runs" / "mine" / "job.toml").touch()
    for action in ("list", "show", "verify"):
        assert command(action, "mine") == 2
        assert "there is no folder mine; the checkpoints of the run of that name" in command.err
        assert "dmuon checkpoint list runs/mine" in command.err


def test_list_shows_the_newest_alone(written: Path, command: Command) -> None:
    assert command("list", written, "--newest", "1") == 0
    _, line = command.out.splitlines()
    assert line.startswith("step-2 ")


def test_list_names_what_is_not_whole_and_only_damage_is_a_failure(
    run: Path, command: Command
) -> None:
    (run / "step-3").mkdir()
    assert command("list", run) == 0
    assert "never finished" in command.out
    cut(run / "step-1" / "model-00001-of-00002.safetensors")
    code, facts = command.json("list", run)
    assert code == 1
    assert [Path(each["path"]).name for each in facts["checkpoints"]] == ["step-2"]
    passed = {Path(each["path"]).name: each["is_damaged"] for each in facts["passed_over"]}
    assert passed == {"step-1": True, "step-3": False}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_list_says_that_nothing_is_there_and_names_what_torch_saved(
    tmp_path: Path, command: Command
) -> None:
    assert command("list", tmp_path) == 0
    assert command.out == f"{tmp_path} has no whole checkpoint of DMuon in it\n"
    torch.distributed.checkpoint.save(
        {"weight": torch.ones(2)}, checkpoint_id=tmp_path / "old", no_dist=True
    )
    assert command("list", tmp_path) == 0
    first, _, _, passed = command.out.splitlines()
    assert first == f"{tmp_path} has no whole checkpoint of DMuon in it"
    assert re.match(r"old +not usable +it is a checkpoint of torch\.distributed\.", passed)
    for action in ("list", "show", "verify"):
        assert command(action, tmp_path / "old") == 2
        assert "format_utils dcp_to_torch FOLDER FILE.pt" in command.err


def test_what_a_run_never_committed_is_no_checkpoint_however_whole_it_is(
    run: Path, command: Command
) -> None:
    unfinished = run / "step-00000003.writing-a2"
    shutil.copytree(run / "step-2", unfinished)
    shutil.copytree(run / "step-2", run / "step-00000004.replaced-1")
    assert command("list", run, "--newest", "1") == 0
    _, newest, *_, written, replaced = command.out.splitlines()
    assert newest.split()[0] == "step-2"
    assert written.split()[:2] == [unfinished.name, "unfinished"]
    assert "an attempt still writes it, or was stopped" in written
    assert "the run has saved this step again since" in replaced
    assert command("verify", run / "step-2", unfinished) == 1
    *_, last = command.out.splitlines()
    assert "unfinished  it was never committed" in last
    _, facts = command.json("verify", run / "step-2", unfinished)
    assert [each["is_good"] for each in facts["checkpoints"]] == [True, False]


@pytest.mark.parametrize("harm", ["none", "cut", "missing", "manifest"])
def test_what_was_never_committed_is_unfinished_in_any_state_and_by_any_name(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    unfinished = run / "step-00000003.writing-a1"
    shutil.copytree(run / "step-2", unfinished)
    weights = unfinished / "model-00001-of-00002.safetensors"
    if harm == "cut":
        cut(weights)
    elif harm == "missing":
        weights.unlink()
    elif harm == "manifest":
        (unfinished / "manifest.json").write_text("{")
    code, facts = command.json("list", run)
    (passed,) = facts["passed_over"]
    assert (code, Path(passed["path"]).name) == (0, unfinished.name)
    assert not passed["is_damaged"]
    assert "it was never committed" in passed["reason"]
    link = run.parent / f"latest-{harm}"
    link.symlink_to(unfinished)
    monkeypatch.chdir(unfinished)
    assert command("verify", ".", link, unfinished) == 1
    _, *lines = command.out.splitlines()
    assert ["unfinished  it was never committed" in line for line in lines] == [True] * 3
    link.unlink()
    link.symlink_to(link)
    assert command("verify", link) in (1, 2)
    assert command.err.startswith("dmuon: ")


def test_show_tells_what_a_checkpoint_holds(written: Path, command: Command) -> None:
    assert command("show", written / "step-2") == 0
    for words in ("replicate 1, shard 2", "head.weight is embed.weight", "config.json", "GROUP 1"):
        assert words in command.out
    code, facts = command.json("show", written / "step-2")
    assert (code, facts["step"], facts["extra"]) == (0, 2, {"tokens": 192, "betas": [0.9, 0.95]})
    assert facts["sections"]["model"]["dtypes"].keys() == {"F32"}
    assert [group["algorithm"] for group in facts["optimizer"]["param_groups"]] == ["muon", "adamw"]


def test_show_says_when_it_is_not_whole(run: Path, command: Command) -> None:
    cut(run / "step-1" / "model-00001-of-00002.safetensors")
    assert command("show", run / "step-1") == 1
    assert "model-00001-of-00002.safetensors was cut" in command.err


def test_verify_names_the_damaged_one_among_several(run: Path, command: Command) -> None:
    assert command("verify", run / "step-1", run / "step-2") == 0
    flip(run / "step-1" / "optim-00002-of-00002.safetensors")
    assert command("verify", run / "step-1", run / "step-2") == 1
    _, first, second = command.out.splitlines()
    assert "damaged" in first
    assert "optim-00002-of-00002.safetensors has changed" in first
    assert "good" in second
    code, facts = command.json("verify", run / "step-1", run / "step-2")
    assert (code, [each["is_good"] for each in facts["checkpoints"]]) == (1, [False, True])


def test_export_writes_a_folder_or_a_file_once(
    written: Path, tmp_path: Path, command: Command
) -> None:
    assert command("export", written / "step-2", tmp_path / "hf") == 0
    assert "written to" in command.out
    assert (tmp_path / "hf" / "config.json").is_file()
    code, facts = command.json("export", written / "step-2", tmp_path / "one.pt")
    assert code == 0
    assert torch.load(tmp_path / "one.pt", weights_only=True).keys() >= {"embed.weight"}
    assert facts["files"] == {"one.pt": (tmp_path / "one.pt").stat().st_size}
    assert command("export", written / "step-2", tmp_path / "hf") == 2
    assert "nothing is overwritten" in command.err


def test_diff_tells_equal_from_different(written: Path, tmp_path: Path, command: Command) -> None:
    assert command("export", written / "step-2", tmp_path / "one.pt") == 0
    assert command("diff", written / "step-2", tmp_path / "one.pt") == 0
    assert "0 differ" in command.out
    assert command("diff", written / "step-1", written / "step-2") == 1
    assert "embed.weight" in command.out
    assert "optimizer.num_steps" in command.out
    code, facts = command.json("diff", written / "step-1", written / "step-2")
    assert code == 1
    assert facts["settings"]["step"] == [1, 2]
    assert facts["only_in_a"] == facts["only_in_b"] == []


def test_infinite_differences_are_json_too(tmp_path: Path, command: Command) -> None:
    a = hand_made(tmp_path / "a", 1, {"w": torch.tensor([1.0, 2.0])}, extra={"worst": float("inf")})
    b = hand_made(tmp_path / "b", 1, {"w": torch.tensor([float("nan"), 2.0])})
    code, facts = command.json("diff", a, b)
    assert (code, facts["values"][0]["largest_absolute"]) == (1, "inf")
    code, facts = command.json("show", a)
    assert (code, facts["extra"]["worst"]) == (0, "inf")


@pytest.mark.parametrize("action", ["list", "show", "verify", "export", "diff"])
def test_bad_use_is_one_clear_line_and_exit_code_2(
    action: str, tmp_path: Path, command: Command
) -> None:
    second = [tmp_path / "there"] if action in ("export", "diff") else []
    assert command(action, tmp_path / "no\nwhere", *second) == 2
    (line,) = command.err.splitlines()
    assert line.startswith("dmuon: ")
    assert "there is no such" in line
    assert command(action, tmp_path / "nowhere", *second, "--traceback") == 2
    assert "Traceback" in command.err


def test_wrong_arguments_end_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        [],
        ["list", "x", "--newest", "0"],
        ["shwo", "x"],
        ["show"],
        ["diff", "a"],
        ["export", "a", "--json"],
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(["checkpoint", *arguments])
        assert caught.value.code == 2
        assert "usage: dmuon checkpoint" in capsys.readouterr().err


def test_the_command_line_can_be_read_without_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; "
        "from dmuon_platform import cli; cli.main(['checkpoint', 'show', '--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "what a checkpoint holds" in done.stdout or "CHECKPOINT" in done.stdout


def test_copy_takes_a_checkpoint_to_a_url_and_back(
    written: Path, tmp_path: Path, command: Command
) -> None:
    url = (tmp_path / "remote").as_uri()
    code, facts = command.json("copy", written / "step-1", url)
    assert (code, facts["step"], facts["target"], facts["kept"]) == (0, 1, url, [])
    assert command("copy", url, tmp_path / "back") == 0
    assert "copied to" in command.out
    assert command("diff", written / "step-1", tmp_path / "back") == 0
    assert command("copy", url, tmp_path / "back") == 2
    assert "nothing is overwritten" in command.err


def test_copy_of_a_damaged_checkpoint_makes_none(
    run: Path, tmp_path: Path, command: Command
) -> None:
    flip(next((run / "step-1").glob("model-*.safetensors")))
    assert command("copy", run / "step-1", tmp_path / "new") == 1
    assert "has changed since it was written" in command.err
    assert not (tmp_path / "new" / "manifest.json").exists()


@pytest.mark.parametrize("url", ["s3://bucket/step-1", "file:///step-1", "gs:/bucket"])
def test_a_url_is_refused_by_all_that_read_and_write_folders(
    url: str, written: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good = written / "step-1"
    for arguments in (
        ("list", url),
        ("show", url),
        ("verify", url),
        ("export", url, tmp_path / "new"),
        ("export", good, f"{url}.pt"),
        ("diff", good, url),
    ):
        assert command(*arguments) == 2, arguments
        assert "it is a URL" in command.err
        assert "dmuon checkpoint copy" in command.err
    assert list(tmp_path.iterdir()) == []
