"""The user and the password in a tracking URI stay where they are needed."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from dmuon_platform import cli
from dmuon_platform.credentials import keep_aside, login_of, with_credentials
from dmuon_platform.drain import Drain, _Formatter
from dmuon_platform.events import Journal
from dmuon_platform.finding import State
from dmuon_platform.preflight import resolve
from dmuon_platform.service_checks import check_mlflow
from dmuon_platform.spec import job_of
from dmuon_platform.spec.uri import is_unclear, without_credentials
from dmuon_platform.tracked_run import is_reachable
from dmuon_platform.tracking import describe
from dmuon_platform.tracking_files import TrackingFiles
from gate import gate
from served import Quiet, served
from small_job import small


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:s3cret@far:5000/x", "http://far:5000/x"),
        ("postgresql://me:s3@cret@far/db", "postgresql://far/db"),
        (
            "postgresql://far/db?user=me&password=s3cret&x=1",
            "postgresql://far/db?user=me&password=***&x=1",
        ),
        ("postgresql+psycopg2://me:s3/cr@et@far/db", "postgresql+psycopg2://far/db"),
        ("no https://me@far/api (nor http://me:x@b)", "no https://far/api (nor http://b)"),
        ("http://far:5000/a@b", "http://far:5000/a@b"),
        ("https://far/?api_key=s3cret", "https://far/?api_key=***"),
        ("mysql://far/db?passwd=s'3cret", "mysql://far/db?passwd=***"),
        (
            "mssql+pyodbc:///?odbc_connect=UID%3Du%3BPWD%3Ds3cret&x=1",
            "mssql+pyodbc:///?odbc_connect=***&x=1",
        ),
        ("sqlite:////runs/me@far.db", "sqlite:////runs/me@far.db"),
    ],
)
def test_only_what_is_secret_is_left_out(text: str, shown: str) -> None:
    assert without_credentials(text) == shown


UNCLEAR = [
    "https://me:s3/cret@far:1",
    "https://me:s3?cret@far",
    "http://me:s3#cret@far",
    "http://me:s3\\cret@far",
    "http://me:s3@cr/et@far",
    "http://me:s3 cret@far",
    "mysql+pymysql://me:s3 cret@far/db",
    "mysql+pymysql://me:s3@cr/et@far/db",
    "postgresql://far/db?password=s3 cret",
]
"""URIs in which a part of a password would be left."""


@pytest.mark.parametrize("uri", UNCLEAR)
def test_a_uri_whose_password_has_no_clear_end_is_refused_and_not_told(
    uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["validate", str(Path(__file__).parents[2] / "jobs/tiny_cpu.toml")]
    assert cli.main([*job, "--set", f'tracking.uri="{toml(uri)}"']) == 78
    address = ["--address", "http://127.0.0.1:1"]
    resume = ["resume", "x", *address, "--set", f'tracking.uri="{toml(uri)}"']
    assert cli.main(resume) == 78
    assert cli.main(["status", "x", "--address", uri]) == 69
    cli.main(["doctor", "--tracking-uri", uri, "--address", uri])
    told = "".join(capsys.readouterr())
    for what in ("tracking.uri: ", "--address ", "the address given ", "the tracking URI "):
        assert f"{what}has a blank, or an '@' after a" in told
    assert "cret" not in told
    assert "cr/et" not in told


def toml(text: str) -> str:
    return text.replace("\\", "\\\\")


def test_the_password_of_a_uri_without_its_scheme_is_not_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = ["validate", str(Path(__file__).parents[2] / "jobs/tiny_cpu.toml"), "--set"]
    for uri in ("me:s3cret@far:5000", "me:s3/cret@far:5000"):
        assert cli.main([*job, f"tracking.uri={uri}"]) == 78
    told = "".join(capsys.readouterr())
    assert told.count("begin with its scheme; write http://far:5000") == 2
    assert "cret" not in told


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:////my runs/me@far.db",
        "file:/home/me@far/my runs",
        "postgresql://me:s3/cr@et@far/db?options=a@b",
        "https://me:s3%2Fcret@far/mlflow",
    ],
)
def test_what_is_clear_is_taken(uri: str) -> None:
    assert not is_unclear(uri)
    assert job_of(small(tracking={"uri": uri})).tracking.uri == uri


def test_the_password_of_a_job_server_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    address = ["--address", "http://me:s3cret@127.0.0.1:1"]
    assert cli.main(["status", "x", *address]) == 69
    cli.main(["doctor", *address])
    job = str(Path(__file__).parents[2] / "jobs/tiny_cpu.toml")
    assert cli.main(["run", job, *address]) == 78
    told = "".join(capsys.readouterr())
    assert told.count("127.0.0.1:1") >= 3
    assert "s3cret" not in told


class Answer(Quiet):
    def reply(self) -> tuple[int, bytes]:
        return 200, b"3.0"


@pytest.fixture
def port() -> Iterator[int]:
    with served(Answer) as place:
        yield int(place.rpartition(":")[2])


def test_a_server_with_a_password_can_be_reached_and_none_is_told(port: int) -> None:
    uri = f"http://me:s3cret@127.0.0.1:{port}"
    assert is_reachable(uri)
    found = check_mlflow(uri, Path())
    assert (found.state, found.seen) == (State.GOOD, f"MLflow 3.0 at http://127.0.0.1:{port}")


def test_doctor_asks_a_server_behind_a_password_as_mlflow_does(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("USERNAME", "PASSWORD", "TOKEN"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{variable}", raising=False)
    with gate(f"http://127.0.0.1:{port}", "me", "s3[cret") as door:
        assert check_mlflow(f"http://me:s3[cret@{door}", Path()).state is State.GOOD
    with gate(f"http://127.0.0.1:{port}", "me", "s3%cr@t") as door:
        refused = check_mlflow(f"http://{door}", Path())
        assert refused.state is State.POOR
        assert "answers 401 (Unauthorized), and no version of MLflow" in refused.seen
        assert "where it wants a user and a password, put MLFLOW_TRACKING" in refused.fix
        named = check_mlflow(f"http://me:s3%25cr%40t@{door}", Path())
        assert (named.state, named.seen) == (State.GOOD, f"MLflow 3.0 at http://{door}")
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3%cr@t")
        assert check_mlflow(f"http://{door}", Path()).state is State.GOOD
    monkeypatch.delenv("MLFLOW_TRACKING_USERNAME")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "abc")
    assert login_of("http://127.0.0.1") == {"Authorization": "Bearer abc"}


def test_a_tracker_that_fails_and_works_again_is_told_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # a drain in this process sets it
    uri = "http://me:s3cret@127.0.0.1:1"
    spec = resolve(job_of(small(storage=str(tmp_path), tracking={"uri": uri})))
    spec.run_dir.mkdir()
    (spec.run_dir / "job.toml").write_text(spec.to_toml())
    files = TrackingFiles(spec.run_dir)
    files.describe(describe(spec, {}, files.run_key()))
    files.want("RUNNING")
    Journal(spec.run_dir).append("launched", host="far", pid=7)
    drain = Drain(spec.run_dir)
    assert not drain.deliver()
    drain._complain(None)
    for arguments in (["logs"], ["status"], ["status", "--json"]):
        cli.main([*arguments, str(spec.run_dir)])
    said = capsys.readouterr().out
    assert "http://127.0.0.1:1 does not answer" in said
    assert "MLflow has been told everything again: http://127.0.0.1:1" in said
    assert "s3cret" not in said + (spec.run_dir / "events.jsonl").read_text()


def test_the_environment_keeps_them_for_their_own_server_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://you:other@far")
    assert with_credentials("http://far") == "http://you:other@far"  # as given by the user
    bare = keep_aside("postgresql://me:s3cret@near/db")
    assert bare == "postgresql://near/db"
    assert with_credentials(bare) == "postgresql://me:s3cret@near/db"
    assert with_credentials(keep_aside("http://far")) == "http://far"


def test_another_password_is_no_other_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    one, other = (
        resolve(job_of(small(storage=str(tmp_path), tracking={"uri": f"http://me:{word}@far"})))
        for word in ("s3cret", "n3w")
    )
    assert one == other
    assert "s3cret" not in one.to_toml() + repr(one)


def test_a_trace_in_the_log_of_the_drain_has_none() -> None:
    record = logging.makeLogRecord({"msg": "API request to http://me:s3cret@far/api failed"})
    assert _Formatter().format(record) == "API request to http://far/api failed"
