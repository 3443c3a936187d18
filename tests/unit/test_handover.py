"""What `status` and `stop` say of a submission, of which no launch has begun."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from dmuon_platform import cli, launch
from dmuon_platform.driver_lease import DriverLease
from dmuon_platform.errors import SpecError
from dmuon_platform.events import Journal
from dmuon_platform.handover import leave_handover, newest_launch, read_handover
from dmuon_platform.spec import JobSpec, load_job
from dmuon_platform.summary import Summary
from rich.console import Console
from served import Quiet, served
from small_job import small

MINE = "raysubmit_2"


class JobServer(Quiet):
    """Knows one submission, as the job server of Ray does."""

    told: ClassVar[tuple[int, bytes]]

    def reply(self) -> tuple[int, bytes]:
        return self.told if self.path == f"/api/jobs/{MINE}" else (500, b"")


@pytest.fixture
def address() -> Iterator[str]:
    with served(JobServer) as place:
        yield f"http://{place}"


def finished_job(storage: Path) -> JobSpec:
    """Leave a run of 10 steps that has finished, and return its job."""
    spec = JobSpec.model_validate(small(name="mine", storage=str(storage), data__source=__file__))
    spec.run_dir.mkdir()
    (spec.run_dir / "job.toml").write_text(spec.to_toml())
    with DriverLease(spec.run_dir):
        journal = Journal(spec.run_dir)
        journal.append("launched")
        journal.append("finished", **summary_of(spec).to_dict())
        journal.append("ended", exit_code=0)
    return spec


def summary_of(spec: JobSpec) -> Summary:
    return Summary(
        name=spec.name,
        steps=spec.num_steps,
        tokens=1,
        restarts=0,
        bits_per_byte=1.0,
        bigram_bits_per_byte=2.0,
        start_bits_per_byte=None,
        checkpoint="x",
        weights_sha256="y",
        export=None,
        steps_replayed_equal=0,
        steps_replayed_different=0,
    )


def submit_again(spec: JobSpec, address: str) -> None:
    leave_handover(spec.run_dir, MINE, address, newest_launch(spec.run_dir))


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        ((200, b'{"status": "PENDING"}'), 3, "mine: finished, and submitted again"),
        ((200, b'{"status": "RUNNING"}'), 3, "mine: finished, and submitted again"),
        ((200, b'{"status": "FAILED"}'), 0, "has ended (FAILED), and no launch of it has begun"),
        ((404, b"Job does not exist"), 0, "is gone: the job server at http://127.0.0.1"),
        ((200, b"[]"), 3, "mine: finished, and submitted again"),  # no answer of a job server
        ((401, b"who are you"), 3, "mine: finished, and submitted again"),
    ],
)
def test_a_submission_counts_as_running_as_long_as_a_launch_of_it_is_to_come(
    answer: tuple[int, bytes],
    code: int,
    words: str,
    address: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(JobServer, "told", answer, raising=False)
    submit_again(finished_job(tmp_path), address)
    assert cli.main(["status", "mine", "--storage", str(tmp_path)]) == code
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "file:///dev/null"])
def test_where_no_job_server_answers_a_submission_is_not_believed_for_ever(
    address: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = finished_job(tmp_path)
    submit_again(spec, address)
    status = ["status", "mine", "--storage", str(tmp_path)]
    assert cli.main(status) == 3
    file = spec.run_dir / "submitted.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"time": time.time() - 1000}))
    capsys.readouterr()
    assert cli.main(status) == 0
    told = capsys.readouterr().out
    assert "mine: finished\n" in told
    assert f"{MINE}, submitted 20" in told
    assert f"has begun no launch, and the job server at {address} does not answer" in told


def test_a_submission_that_cannot_be_stopped_from_here_is_told_with_what_stops_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = finished_job(tmp_path)
    stop = ["stop", "mine", "--storage", str(tmp_path), "--wait"]
    assert cli.main(stop) == 0
    submit_again(spec, "http://127.0.0.1:9")
    assert cli.main(stop) == 69
    told = capsys.readouterr()
    assert "mine is not running, but was submitted again as raysubmit_2, of which" in told.err
    assert "`dmuon stop raysubmit_2 --address http://127.0.0.1:9` stops it from where" in told.err
    assert told.out == "mine is not running: finished.\n"


@pytest.fixture
def as_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of this process are those of the submission."""
    told = json.dumps({"metadata": {"job_submission_id": MINE}})
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", told)


def test_a_launch_here_of_what_a_cluster_ran_last_says_that_it_is_here(tmp_path: Path) -> None:
    spec = finished_job(tmp_path)
    console = Console()
    with console.capture() as told:
        launch._tell_where(spec, None, console)
    assert told.get().startswith("mine: starting Ray")
    with DriverLease(spec.run_dir, "10.0.0.1:6379", MINE, "http://h:8265"):
        pass
    with console.capture() as told:
        launch._tell_where(spec, None, console)
    way = f"`dmuon resume mine --storage={tmp_path} --address http://h:8265` goes on with it there"
    where = f"mine was run as {MINE} on a cluster last, and goes on on this machine; {way}\n"
    assert told.get().startswith(where)
    with console.capture() as told:
        launch._tell_where(spec, "10.0.0.1:6379", console)
    assert told.get().startswith("mine: joining Ray at 10.0.0.1:6379")


@pytest.mark.usefixtures("as_submitted")
def test_a_launch_with_nothing_to_do_settles_its_submission_and_the_length(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = finished_job(tmp_path)
    longer = JobSpec.model_validate(
        spec.model_dump() | {"train": {**vars(spec.train), "steps": 20}}
    )
    (spec.run_dir / "job.toml").write_text(longer.to_toml())  # it was stopped as it started
    submit_again(spec, "http://127.0.0.1:9")
    status = ["status", "mine", "--storage", str(tmp_path)]
    assert cli.main(status) == 3
    fewer = JobSpec.model_validate(spec.model_dump() | {"train": {**vars(spec.train), "steps": 5}})
    for job, recorded in ((fewer, 20), (spec, 10)):
        launch.run_job(job)
        assert "nothing to do" in capsys.readouterr().out
        assert load_job(spec.run_dir / "job.toml").num_steps == recorded
    assert cli.main(status) == 0
    assert "submitted" not in capsys.readouterr().out


@pytest.mark.usefixtures("as_submitted")
def test_a_launch_that_is_refused_says_so_to_who_submitted_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = finished_job(tmp_path)
    submit_again(spec, "http://127.0.0.1:9")
    other = spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"lr": 0.5})})
    with pytest.raises(SpecError):
        launch.run_job(other)
    assert cli.main(["status", "mine", "--storage", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "mine: finished\n" in told
    assert f"{MINE}, submitted 20" in told
    assert "was refused: 'mine' was already started in" in told
    assert "optimizer.lr: 0.02 -> 0.5 Set these back" in told
    with DriverLease(spec.run_dir):  # of another launch
        pass
    assert read_handover(spec.run_dir) is None
