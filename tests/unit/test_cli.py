"""The command: what it prints, and with which exit code it ends."""

import argparse
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest
from dmuon_platform import cli, launch, remote_jobs
from dmuon_platform.driver_lease import DriverLease
from dmuon_platform.errors import Diverged, GracefulStop, PlatformError
from dmuon_platform.events import Journal
from dmuon_platform.git_state import git_state
from dmuon_platform.spec import JobSpec, load_job
from dmuon_platform.warning_text import sentences
from ray._private.runtime_env import packaging
from ray.job_submission import JobDetails, JobStatus, JobType
from served import Quiet, served
from small_job import small

import dmuon

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "jobs" / "tiny_cpu.toml")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[JobSpec]:
    """Jobs that reach ``launch``, which is replaced."""
    jobs: list[JobSpec] = []
    monkeypatch.setattr(launch, "run_job", jobs.append)
    return jobs


def test_run_launches_the_job_with_its_changes(launched: list[JobSpec]) -> None:
    changes = ["--set", "train.steps=50", "name=short", "--set=optimizer.lr=0.01"]
    assert cli.main(["run", TINY, *changes, "--address", "h:6379"]) == 0
    (job,) = launched
    assert (job.name, job.train.steps, job.optimizer.lr) == ("short", 50, 0.01)
    assert job.resources.address == "h:6379"


def test_a_wrong_job_is_refused_in_words_with_exit_code_78(
    launched: list[JobSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", TINY, "--set", "train.stps=50"]) == 78
    printed = capsys.readouterr()
    assert "train.stps: there is no such key; did you mean train.steps?" in printed.err
    assert "Traceback" not in printed.err
    assert launched == []


def test_the_stack_trace_is_there_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", TINY, "--set", "train.stps=50", "--traceback"]) == 78
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PlatformError("gave up"), 1),
        (GracefulStop("stopped"), 75),
        (Diverged("loss"), 86),
        (ZeroDivisionError("a bug"), 70),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_end_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
    def fail(_spec: JobSpec) -> None:
        raise error

    monkeypatch.setattr(launch, "run_job", fail)
    assert cli.main(["run", TINY]) == code
    assert ("Traceback" in capsys.readouterr().err) == (code == 70)


def test_schema_prints_a_json_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"name", "data", "train"} <= set(schema["required"])


def test_validate_shows_the_plan_and_starts_nothing(
    launched: list[JobSpec],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["validate", TINY]) == 0
    printed = capsys.readouterr().out
    assert "mesh 1 x 2 (replicate x shard)" in printed
    assert "hidden matrices over 2 owners" in printed
    assert launched == []
    assert list(tmp_path.iterdir()) == []


def test_validate_refuses_data_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", TINY, "--set", "data.source=/nowhere/*.txt"]) == 78
    assert "no file matches '/nowhere/*.txt'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["run"], ["submit", TINY], ["walk"], ["status", "x", "--every", "nan"]]
)
def test_wrong_arguments_show_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: dmuon" in capsys.readouterr().err


def test_jobs_train_is_dmuon_run_from_a_clone_without_installation(tmp_path: Path) -> None:
    program = ROOT / "jobs" / "train.py"
    done = subprocess.run(
        [sys.executable, str(program), TINY, "--set", "train.stps=1"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 78
    assert "did you mean train.steps?" in done.stderr


class FakeServer:
    """A job server that remembers what it was given."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, object]] = []
        self.status = JobStatus.SUCCEEDED
        self.exit_code: int | None = None

    def list_jobs(self) -> list[JobDetails]:
        kind = JobType.SUBMISSION
        return [
            JobDetails(
                type=kind,
                status=self.status,
                submission_id="raysubmit_1",
                entrypoint="x",
                metadata=job["metadata"],
                driver_exit_code=self.exit_code,
            )
            for job in self.jobs
        ]

    def get_job_logs(self, _submission: str) -> str:
        return "trained\n"

    def get_job_info(self, _submission: str) -> JobDetails:
        return self.list_jobs()[-1]

    async def tail_job_logs(self, _submission: str) -> AsyncIterator[str]:
        yield "trained\n"

    def submit_job(self, **job: object) -> str:
        self.jobs.append(job)
        return "raysubmit_1"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    fake = FakeServer()
    monkeypatch.setattr(remote_jobs, "JobSubmissionClient", lambda _address: fake)
    monkeypatch.chdir(ROOT)
    return fake


def test_submit_from_a_clone_uploads_it_and_runs_its_program(server: FakeServer) -> None:
    changes = ["--set", "name=a_b", "data.source=README*.md"]
    address = "http://127.0.0.1:8265"
    assert cli.main(["submit", "jobs/tiny_cpu.toml", *changes, "--address", address]) == 0
    (job,) = server.jobs
    assert str(job["entrypoint"]).startswith(
        "python jobs/train.py jobs/tiny_cpu.toml --set=name=a_b '--set=data.source=README*.md'"
    )
    environment = job["runtime_env"]
    assert isinstance(environment, dict)
    assert environment["working_dir"] == str(ROOT)
    assert "py_modules" not in environment


@pytest.mark.parametrize(
    ("status", "exit_code", "code"),
    [
        (JobStatus.SUCCEEDED, 0, 0),
        (JobStatus.STOPPED, None, 75),  # by `dmuon stop --address`
        (JobStatus.FAILED, 75, 75),
        (JobStatus.FAILED, -9, 75),
        (JobStatus.FAILED, 86, 86),
        (JobStatus.FAILED, 3, 3),
        (JobStatus.FAILED, None, 1),
    ],
)
def test_who_follows_a_job_ends_as_it_did(
    server: FakeServer, status: JobStatus, exit_code: int | None, code: int
) -> None:
    submit = ["submit", "jobs/tiny_cpu.toml", "--address", "http://127.0.0.1:8265"]
    server.status, server.exit_code = status, exit_code
    assert cli.main([*submit, "--follow"]) == code


@pytest.mark.parametrize("follow", [[], ["--follow"]])
def test_logs_of_a_submission_leave_out_what_ray_guesses(
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    follow: list[str],
) -> None:
    line = "(raylet) worker 7 is gone. Some common causes include: (1) the OOM killer, (2) more.\n"
    server.jobs.append({"metadata": {"dmuon_name": "mine"}})
    monkeypatch.setattr(server, "get_job_logs", lambda _: f"{line}step 1\n")

    async def tail(_submission: str) -> AsyncIterator[str]:
        yield f"{line}step 1\n"

    monkeypatch.setattr(server, "tail_job_logs", tail)
    assert cli.main(["logs", "mine", "--address", "http://127.0.0.1:8265", *follow]) == 0
    assert capsys.readouterr().out == "(raylet) worker 7 is gone.\nstep 1\n"


@pytest.mark.parametrize(("exit_code", "code"), [(78, 78), (66, 66), (3, 75)])
def test_a_later_submission_that_was_refused_keeps_a_scheduler_from_launching_again(
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    exit_code: int,
    code: int,
) -> None:
    server.jobs = [{"metadata": {"dmuon_name": "mine", "dmuon_storage": "/runs"}}] * 2
    stopped, refused = server.list_jobs()
    stopped.status, stopped.start_time = JobStatus.STOPPED, 1
    refused.status, refused.start_time = JobStatus.FAILED, 2
    refused.driver_exit_code = exit_code
    monkeypatch.setattr(server, "list_jobs", lambda: [stopped, refused])
    assert cli.main(["status", "mine", "--address", "http://127.0.0.1:8265"]) == code
    told = capsys.readouterr().out
    assert "mine: stopped, as" in told
    assert "submitted later, was refused: trained" in told


class FailingServer(Quiet):
    """A job server whose dashboard is there, and the rest of it is not."""

    code = 500

    def reply(self) -> tuple[int, bytes]:
        is_greeting = self.path == "/api/version"
        answer = {"version": "4", "ray_version": "2", "ray_commit": "x", "session_name": "y"}
        body = json.dumps(answer).encode() if is_greeting else b"out of order"
        return (200 if is_greeting else self.code), body


@pytest.mark.parametrize("code", [500, 401])
@pytest.mark.parametrize("command", [["submit", TINY], ["status", "x"], ["stop", "x"]])
def test_a_job_server_that_fails_is_told_in_a_sentence(
    command: list[str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(FailingServer, "code", code)
    with served(FailingServer) as place:
        address = f"http://{place}"
        assert cli.main([*command, "--address", address]) == 69
    assert f"The job server at {address} does not list its jobs" in capsys.readouterr().err


class OtherServer(Quiet):
    """Another program that speaks HTTP; what it answers is the first part of the path."""

    answers: ClassVar[dict[str, tuple[int, bytes]]] = {
        "not-found": (404, b""),
        "broken": (500, b""),
        "page": (200, b"<html>"),
        "other": (200, b"{}"),
        "list": (200, b"[]"),
        "guarded": (401, b"who are you?"),
    }

    def reply(self) -> tuple[int, bytes]:
        return self.answers[self.path.split("/")[1]]


@pytest.mark.parametrize("kind", OtherServer.answers)
def test_what_is_no_job_server_is_told_as_that_and_not_in_rays_words(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(OtherServer) as place:
        address = f"http://{place}/{kind}"
        assert cli.main(["status", "x", "--address", address]) == 69
    told = capsys.readouterr().err
    if kind == "guarded":
        assert "set RAY_AUTH_MODE and RAY_AUTH_TOKEN as on its head" in told
    else:
        assert f"What answers at --address {address} is not Ray's job server" in told
        assert "http://HOST:8265 unless its port was changed" in told
    assert "Version check" not in told


@pytest.mark.parametrize("address", ["http://127.0.0.1:99999", "http://[::1", "http://a:b"])
def test_what_can_be_no_address_is_told_as_that(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", "x", "--address", address]) == 69
    told = capsys.readouterr().err
    assert f"--address {address} cannot be an address: " in told
    assert "Write it as http://HOST:8265." in told


@pytest.mark.parametrize("storage", ["runs", "/mnt/my runs"])
def test_a_stopped_job_is_told_with_the_command_that_goes_on_with_it(
    server: FakeServer, capsys: pytest.CaptureFixture[str], storage: str
) -> None:
    server.jobs.append({"metadata": {"dmuon_name": "mine", "dmuon_storage": storage}})
    server.status = JobStatus.STOPPED
    assert cli.main(["status", "mine", "--address", "http://me:s3cret@127.0.0.1:8265"]) == 75
    told = capsys.readouterr().out
    way = f"dmuon resume mine '--storage={storage}' --address http://127.0.0.1:8265"
    assert ("submit its job again" if storage == "runs" else way) in told


def test_a_run_that_goes_on_is_not_submitted_again_and_another_of_its_name_is(
    server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    submit = ["submit", "jobs/tiny_cpu.toml", "--address", "http://me:s3cret@127.0.0.1:8265"]
    assert cli.main(submit) == 0
    assert "dmuon logs tiny_cpu --address http://127.0.0.1:8265 --fol" in capsys.readouterr().out
    for server.status in (JobStatus.PENDING, JobStatus.RUNNING):
        assert cli.main(submit) == 3
        message = capsys.readouterr().err
        assert "tiny_cpu is already running at http://127.0.0.1:8265, as raysubmit_1" in message
        assert "dmuon stop tiny_cpu --address http://127.0.0.1:8265" in message
    elsewhere = [*submit, f"--set=storage={tmp_path}"]
    assert cli.main(elsewhere) == 0
    server.status = JobStatus.STOPPED  # now only its folder tells
    (tmp_path / "tiny_cpu").mkdir()
    with DriverLease(tmp_path / "tiny_cpu"):
        assert cli.main(elsewhere) == 3
    assert f"is already being run by process {os.getpid()}" in capsys.readouterr().err
    assert len(server.jobs) == 2


AT_NOBODY = ("--address", "http://127.0.0.1:9")
"""Whatever gets as far as the server ends with 69."""


def test_a_run_that_is_submitted_again_says_so_until_a_launch_begins(
    server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "tiny_cpu"
    address = "http://me:s3cret@127.0.0.1:9"  # whose password is written nowhere
    submit = ["submit", TINY, "--address", address, "--set", f"storage={tmp_path}"]
    assert cli.main(submit) == 0
    assert not folder.exists()  # whose it is, is for the launch to say
    folder.mkdir()
    Journal(folder).append("launched")
    with DriverLease(folder):
        pass
    Journal(folder).append("ended", exit_code=75, problem="SIGTERM")
    status = ["status", "tiny_cpu", "--storage", str(tmp_path)]
    capsys.readouterr()
    assert cli.main(status) == 75
    assert "submitted" not in capsys.readouterr().out
    assert cli.main(submit) == 0
    assert cli.main(status) == 3
    told = capsys.readouterr().out
    assert "tiny_cpu: stopped, and submitted again\n" in told
    assert "no launch has begun since" in told
    assert "`dmuon status raysubmit_1 --address http://127.0.0.1:9`" in told
    with DriverLease(folder):
        assert cli.main(status) == 3
    assert cli.main([*status, "--json"]) == 75
    assert '"submitted": null' in capsys.readouterr().out


@pytest.mark.parametrize("action", ["submit", "resume"])
def test_a_changed_job_is_refused_before_it_is_handed_over_where_its_run_is_seen(
    action: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(ROOT)
    at = f"storage={tmp_path}"
    spec = load_job(TINY, [at])
    spec.run_dir.mkdir()
    (spec.run_dir / "job.toml").write_text(spec.to_toml())
    command = ["submit", "jobs/tiny_cpu.toml", "--set", at]
    if action == "resume":
        command = ["resume", "tiny_cpu", "--storage", str(tmp_path), "--set"]
    assert cli.main([*command, "train.steps=9000", *AT_NOBODY]) == 69
    capsys.readouterr()
    assert cli.main([*command, "optimizer.lr=0.5", *AT_NOBODY]) == 78
    told = capsys.readouterr().err
    assert f"'tiny_cpu' was already started in {spec.run_dir} with another job" in told
    assert "optimizer.lr: 0.02 -> 0.5" in told
    (spec.run_dir / "job.toml").unlink()  # not seen from here, so the cluster tells
    assert cli.main([*command, "optimizer.lr=0.5", *AT_NOBODY]) == 69


def test_a_model_that_only_the_cluster_sees_is_the_one_that_the_run_began_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    job = small(name="mine", storage=str(tmp_path), model__path="/nobody/model")
    Path("mine.json").write_text(json.dumps(job))
    tokenizer = "data.tokenizer=/nobody/model/tokenizer.json"  # as where the model is seen
    kept = tmp_path / "mine" / "origin" / "tokenizer.json"
    kept.parent.mkdir(parents=True)
    kept.touch()
    (tmp_path / "mine" / "job.toml").write_text(load_job("mine.json", [tokenizer]).to_toml())
    submit = ["submit", "mine.json", *AT_NOBODY]
    assert cli.main(submit) == 69
    assert cli.main([*submit, "--set", "model.path=/nobody/other"]) == 78


def test_a_storage_that_is_no_folder_is_refused_before_the_job_is_handed_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "file").touch()
    command = ["submit", "jobs/tiny_cpu.toml", *AT_NOBODY, "--set"]
    assert cli.main([*command, f"storage={tmp_path}/new/runs"]) == 69
    capsys.readouterr()
    assert cli.main([*command, f"storage={tmp_path}/file/runs"]) == 1
    folder = tmp_path / "file" / "runs" / "tiny_cpu"
    assert f"The run folder {folder} cannot be written (Not a directory)" in capsys.readouterr().err


def test_a_submitted_job_knows_the_commit_though_its_copy_has_no_repository(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = git_state(ROOT)
    if not here:
        pytest.skip("this is no clone")
    address = "http://127.0.0.1:8265"
    assert cli.main(["submit", "jobs/tiny_cpu.toml", "--address", address]) == 0
    environment = server.jobs[0]["runtime_env"]
    assert isinstance(environment, dict)
    assert git_state(tmp_path) == {}
    for name, value in environment["env_vars"].items():
        monkeypatch.setenv(name, value)
    assert git_state(tmp_path) == here


def test_submit_from_elsewhere_brings_our_packages(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text(Path(TINY).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["submit", "mine.toml", "--address", "http://127.0.0.1:8265"]) == 0
    (job,) = server.jobs
    assert job["entrypoint"] == "python -P -m dmuon_platform.cli run mine.toml"
    environment = job["runtime_env"]
    assert isinstance(environment, dict)
    packages = {Path(module).relative_to(ROOT).as_posix() for module in environment["py_modules"]}
    assert packages == {"dmuon", "platform/dmuon_platform"}


def test_resume_on_a_cluster_uploads_no_job_and_needs_the_storage_that_the_cluster_sees(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["resume", "mine", "--address", "http://127.0.0.1:8265", "--set=train.steps=9"]
    assert cli.main(arguments) == 78
    message = capsys.readouterr().err
    assert "--storage runs must be the absolute path" in message
    assert f"that is --storage {Path.cwd() / 'runs'}" in message
    assert server.jobs == []
    assert cli.main([*arguments, "--storage", "/mnt/runs"]) == 0
    (job,) = server.jobs
    assert job["entrypoint"] == (
        "python -P -m dmuon_platform.cli resume mine --storage=/mnt/runs --set=train.steps=9"
    )
    assert job["metadata"] == {
        "dmuon_name": "mine",
        "dmuon_storage": "/mnt/runs",
        "dmuon_address": "http://127.0.0.1:8265",
    }
    environment = job["runtime_env"]
    assert isinstance(environment, dict)
    assert "working_dir" not in environment
    assert environment["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "60"


@pytest.mark.parametrize("key", ["model.path", "data.tokenizer", "data.source"])
def test_submit_refuses_what_it_does_not_upload(
    server: FakeServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    key: str,
) -> None:
    sizes = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    job = Path(TINY).read_text(encoding="utf-8").splitlines()
    kept = [line for line in job if not line.startswith(tuple(sizes.split()))]
    (tmp_path / "mine.toml").write_text("\n".join(kept), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    arguments = ["submit", "mine.toml", "--address", "http://127.0.0.1:8265", "--set"]
    assert cli.main([*arguments, f"{key}=runs/tiny_cpu/export"]) == 78
    message = capsys.readouterr().err
    assert f"{key}: runs/tiny_cpu/export is not uploaded" in message
    assert "absolute path" in message
    assert server.jobs == []
    assert cli.main([*arguments, f"{key}=/mnt/runs/tiny_cpu/export"]) == 0
    assert cli.main([*arguments, f"{key}=elsewhere/export"]) == 78
    message = capsys.readouterr().err
    if key == "data.source":
        assert "no file matches 'elsewhere/export'" in message
    else:
        assert f"{key}: there is no elsewhere/export below" in message
        assert "which is what the cluster gets; correct it" in message


@pytest.mark.parametrize(
    ("ignore", "missing"),
    [
        ("*.txt\n", "text/a.txt"),
        ("text/*\n!text/a.txt\n", "text/b.txt"),
        ("/text\n", "text/a.txt"),
        ("mine.toml\n", "mine.toml"),
        ("*\n", "mine.toml"),
        ("other/\n*.bin\n", None),
    ],
)
@pytest.mark.parametrize("file", [".gitignore", ".rayignore"])
def test_submit_refuses_what_an_ignore_file_names(
    server: FakeServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    file: str,
    ignore: str,
    missing: str | None,
) -> None:
    (tmp_path / "text").mkdir()
    for name in ("text/a.txt", "text/b.txt"):
        (tmp_path / name).write_text("words", encoding="utf-8")
    (tmp_path / "mine.toml").write_text(Path(TINY).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / file).write_text(ignore, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    arguments = ["submit", "mine.toml", "--address", "http://127.0.0.1:8265"]
    code = cli.main([*arguments, "--set", "data.source=text/*.txt"])
    uploaded: list[str] = []
    packaging._dir_travel(
        tmp_path,
        [packaging._get_excludes(tmp_path, [".git"])],
        lambda path: uploaded.append(str(path.relative_to(tmp_path))),
        include_gitignore=True,
    )
    if missing is None:
        assert code == 0
    else:
        assert missing not in uploaded
        assert code == 78
        assert f"{missing} is not uploaded" in capsys.readouterr().err
        assert server.jobs == []


def test_its_version_comes_with_those_that_a_run_depends_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert re.fullmatch(
        rf"dmuon {re.escape(dmuon.__version__)} \(Python 3\S+, torch \S+, ray \S+, mlflow \S+\)\n",
        capsys.readouterr().out,
    )


def test_without_a_command_it_shows_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    printed = capsys.readouterr().err
    assert "usage: dmuon" in printed
    assert "write a first job file" in printed


def test_submit_says_where_a_relative_storage_will_lie(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["submit", "jobs/tiny_cpu.toml", "--address", "http://127.0.0.1:8265"]
    assert cli.main(arguments) == 0
    assert "'runs' lies in the home folder of the cluster's user" in capsys.readouterr().out
    assert cli.main([*arguments, "--set", "storage=/mnt/runs"]) == 0
    assert "home folder" not in capsys.readouterr().out


def test_a_wrong_job_is_not_submitted(server: FakeServer) -> None:
    arguments = ["submit", "jobs/tiny_cpu.toml", "--address", "http://127.0.0.1:8265"]
    assert cli.main([*arguments, "--set", "optimizer.momentum=2"]) == 78
    assert server.jobs == []


def test_a_job_outside_the_uploaded_folder_is_refused(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["submit", TINY, "--address", "http://127.0.0.1:8265"]) == 78
    assert server.jobs == []


def test_a_server_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(["submit", "jobs/tiny_cpu.toml", "--address", "http://127.0.0.1:9"]) == 69
    printed = capsys.readouterr().err
    assert "No Ray job server answers at --address http://127.0.0.1:9" in printed
    assert "Traceback" not in printed


def test_a_warning_of_ours_is_a_sentence_and_one_of_others_keeps_its_place() -> None:
    ours, others = launch.__file__, argparse.__file__
    with sentences():
        assert warnings.formatwarning("It is so.", UserWarning, ours, 1) == "dmuon: It is so.\n"
        assert "argparse.py:1: UserWarning" in warnings.formatwarning("x", UserWarning, others, 1)
        assert "FutureWarning" in warnings.formatwarning("x", FutureWarning, ours, 1)
    assert "UserWarning" in warnings.formatwarning("It is so.", UserWarning, ours, 1)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.path=no/model", "no/model: there is no such folder (a relative path counts from"),
        ("data.tokenizer=no.json", "(No such file or directory) (a relative path counts from"),
    ],
)
def test_a_relative_path_that_leads_nowhere_is_told_with_the_folder_of_the_command(
    setting, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "job.json"
    job.write_text(json.dumps(small()), encoding="utf-8")
    assert cli.main(["validate", str(job), "--set", setting]) == 78
    told = capsys.readouterr().err
    assert said in told
    assert f"the folder of the command, {tmp_path})" in told
    absolute = setting.replace("=", "=/nowhere/")
    assert cli.main(["validate", str(job), "--set", absolute]) == 78
    assert "a relative path" not in capsys.readouterr().err
