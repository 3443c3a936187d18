"""A tracker behind a password: told everything, and the password stands in no file."""

import os
from pathlib import Path

import pytest
from cluster import driver
from dmuon_platform.tracking import delivery
from gate import gate

pytestmark = pytest.mark.cluster

SECRET = "s3cr%40t"


def files_with(text: str, folder: Path) -> list[str]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [str(file) for file in files if text.encode() in file.read_bytes()]


def test_the_password_of_a_tracker_stands_in_no_file(server, text, tmp_path):
    run = driver.make_run(tmp_path, text, steps=4)
    few = driver.settings("evaluation.every=none", "schedule.warmup_steps=1")
    known = {k: "" for k in os.environ if k.startswith("MLFLOW_TRACKING_")}
    with gate(server.uri, "me", "s3cr@t") as door:
        uri = driver.settings(f"tracking.uri=http://me:{SECRET}@{door}")
        code, output = driver.run("run", run.job, *few, *uri, **known)
        assert code == 0, output
        assert delivery(run.folder).is_complete, output
        assert "registered model" in output
        assert f"http://{door}" in (run.folder / "job.toml").read_text()

        (run.folder / "tracking" / "delivered.json").unlink()
        resume = ("resume", "small", "--storage", run.folder.parent)
        code, stranger = driver.run(*resume, **known)
        assert code == 0, stranger
        assert "401" in stranger
        assert "If the server wants a user and a password, launch" in " ".join(stranger.split())

        known |= {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "s3cr@t"}
        code, friend = driver.run(*resume, **known)
        assert code == 0, friend
        assert delivery(run.folder).is_complete, friend
    for secret in (SECRET, "s3cr@t"):
        assert secret not in output + stranger + friend
        assert files_with(secret, run.folder.parent) == []
        assert files_with(secret, server.folder) == []
