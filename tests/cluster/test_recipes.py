"""What ``docker/compose.yaml`` starts, started without containers, trains and tracks a job."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import mlflow
import pytest
import yaml
from compose_services import COMPOSE, SECRETS, Services, needs_programs

pytestmark = [pytest.mark.cluster, needs_programs]

QUICK = (
    "train.steps=6",
    "schedule.warmup_steps=2",
    "evaluation.sequences=8",
    "checkpoint.every=3",
    "evaluation.every=none",
)
POSTGRES_USERS = ("postgres", "nobody")


@pytest.fixture
def services() -> Iterator[Services]:
    folder = Path(tempfile.mkdtemp(prefix="dmuon-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        with Services(folder) as services:
            yield services
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start_postgres(services: Services) -> bool:
    """Start this machine's PostgreSQL as the image starts its own; False where there is none."""
    if shutil.which("initdb") is None or shutil.which("postgres") is None:
        return False
    folder = services.folder / "postgres"
    folder.mkdir()
    password = folder / "password"
    password.write_text(SECRETS["POSTGRES_PASSWORD"])
    options = {}
    if os.getuid() == 0:  # which PostgreSQL refuses to be
        names = {each.pw_name for each in pwd.getpwall()}
        user = pwd.getpwnam(next(name for name in POSTGRES_USERS if name in names))
        for path in (folder, password):
            os.chown(path, user.pw_uid, user.pw_gid)
        options = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    data = folder / "data"
    initdb = ["initdb", "--pgdata", data, "--username=mlflow", "--auth=scram-sha-256"]
    initdb += ["--no-sync", "--pwfile", password]
    subprocess.run(initdb, check=True, capture_output=True, cwd=folder, **options)
    command = ["postgres", "-D", str(data), "-p", str(services.port(5432)), "-k", str(folder)]
    services.start("postgres", [*command, "-c", "listen_addresses=127.0.0.1"], **options)
    environment = {**services.environment("postgres"), "PGPASSWORD": SECRETS["POSTGRES_PASSWORD"]}
    createdb = ["createdb", "--username=mlflow", "mlflow"]
    subprocess.run(createdb, check=True, env=environment)
    return True


def answer_to(host: str, services: Services) -> int:
    """The status of MLflow's front page for those who call it by that name."""
    page = Request(f"http://127.0.0.1:{services.port(5000)}/", headers={"Host": host})
    try:
        return urlopen(page, timeout=20).status
    except HTTPError as error:
        return error.code


def test_the_compose_file_starts_a_cluster_that_trains_and_tracks(services, text, monkeypatch):
    if not start_postgres(services):
        database = services.folder / "mlflow.db"
        services.changes["MLFLOW_BACKEND_STORE_URI"] = f"sqlite:///{database}"
    services.start("mlflow")
    port = services.port(5000)
    assert answer_to(f"mlflow:{port}", services) == 200
    assert answer_to("elsewhere:5000", services) == 403

    services.start("head")
    services.start("worker-1")
    services.start("worker-2")
    code, output = services.run("train", *QUICK, f"data.source={text}")
    assert code == 0, output
    assert "validation bits per byte" in output
    folder = services.folder / "storage" / "tiny_cpu"
    assert (folder / "checkpoints" / "step-00000006" / "manifest.json").is_file()

    # A retry of the Kubernetes job, whose run is finished by now.
    _, job = yaml.safe_load_all((COMPOSE.parent / "rayjob.yaml").read_text())
    code, output = services.ray_job(job["spec"], *QUICK, f"data.source={text}")
    assert code == 0, output
    assert "already finished: nothing to do" in output

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    client = mlflow.MlflowClient(f"http://127.0.0.1:{port}")
    (run,) = client.search_runs([client.get_experiment_by_name("dmuon").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["train/tokens"] == 6 * 16 * 128
    (version,) = client.search_model_versions("name = 'tiny_cpu'")
    assert version.run_id == run.info.run_id
    assert any((services.folder / "artifacts").rglob("model*.safetensors"))
