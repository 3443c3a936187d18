"""The same job handed to a Ray cluster that is already there."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import psutil
import pytest
import tries
from cluster import driver
from dmuon_platform.data import BYTES, load_tokenizer, tokenise
from dmuon_platform.driver_lease import DriverLease
from dmuon_platform.events import Journal
from dmuon_platform.spec import load_job

pytestmark = pytest.mark.cluster

RAY = Path(sys.executable).with_name("ray")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def head():
    """A Ray head with a job server, in a folder and on ports of its own: (environment, ports)."""
    env, ports, process = tries.persist(_start_head)
    yield env, ports
    _end(process, env)


def _start_head():
    folder = tempfile.mkdtemp(prefix="dmuon-head-", dir="/tmp")
    ports = {"gcs": _free_port(), "jobs": _free_port()}
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "HOME": folder}
    env |= {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
    # The job's command says `python`: it must be the one of this environment.
    env["PATH"] = os.pathsep.join([str(RAY.parent), env.get("PATH", "")])
    command = [
        *(RAY, "start", "--head", "--block", "--num-cpus=4", "--node-ip-address=127.0.0.1"),
        *(f"--port={ports['gcs']}", f"--dashboard-port={ports['jobs']}"),
        *(f"--temp-dir={folder}", "--object-store-memory=150000000"),
        "--dashboard-agent-listen-port=0",
    ]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    env["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{ports['jobs']}"
    try:
        driver.wait_until(lambda: _listens(ports["jobs"]), process)
    except BaseException:
        _end(process, env)
        raise
    return env, ports, process


def _end(process, env):
    family = driver.family(process, "")
    process.terminate()
    _, alive = psutil.wait_procs(family, timeout=8)
    for one in alive:
        one.kill()
    process.communicate()
    shutil.rmtree(env["HOME"], ignore_errors=True)


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def test_the_doctor_finds_the_job_server(head, tmp_path):
    env, ports = head
    options = ("--storage", tmp_path, "--json")
    code, output = driver.run(
        "doctor", "--address", env["RAY_API_SERVER_ADDRESS"], *options, RAY_AUTH_MODE="disabled"
    )
    found = {each["about"]: each["state"] for each in json.loads(output)}
    assert (code, found["Ray job server"]) == (0, "ok"), output
    code, output = driver.run("doctor", "--address", f"127.0.0.1:{ports['gcs']}", *options)
    found = {each["about"]: each["state"] for each in json.loads(output)}
    assert (code, found["Ray"]) == (0, "ok"), output


def test_ray_job_submit_does_what_dmuon_run_does_also_when_it_is_stopped_and_submitted_again(
    head, reference, text, tmp_path
):
    env, _ = head
    undisturbed, _ = reference
    run = driver.make_run(tmp_path, text)
    job = "dmuon-to-be-stopped"
    command = [RAY, "job", "submit", "--working-dir", "."]
    waits = ["--runtime-env-json", '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}']
    entrypoint = ["--", "python", "jobs/train.py", run.job]
    submit = partial(
        subprocess.run,
        cwd=driver.REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
        timeout=driver.PATIENCE_S,
    )
    submit([*command, *waits, "--no-wait", "--submission-id", job, *entrypoint], check=True)
    driver.wait_until(lambda: run.events("launched"))
    _unpack_again(Path(env["HOME"]))  # as a second node on this machine does
    driver.wait_until(lambda: max(run.metrics(), default=0) >= 13)
    assert json.loads((run.folder / "driver.json").read_text())["ray_job"] == job
    submit([RAY, "job", "stop", job], check=True)
    (stopped,) = run.events("stopped")
    assert stopped["reason"] == "SIGTERM"
    assert stopped["checkpoint"] == stopped["step"] < driver.STEPS
    assert [event["exit_code"] for event in run.events("ended")] == [75]

    done = submit([*command, *entrypoint])
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.events("training_started")[-1]["step"] == stopped["step"]
    assert run.results() == undisturbed.results()
    assert "validation bits per byte" in done.stdout


def _unpack_again(head: Path) -> None:
    """Put a new folder in the place of each that a job was uploaded to, and works in."""
    for folder in head.glob("session_2*/runtime_resources/working_dir_files/_ray_pkg_*/"):
        fresh, old = folder.with_name("fresh"), folder.with_name("old")
        shutil.copytree(folder, fresh)
        folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old)


def test_too_few_cpus_in_the_cluster_are_refused_before_workers_start(head, text, tmp_path):
    _, ports = head
    run = driver.make_run(tmp_path, text)
    command = (
        *("run", run.job, "--address", f"127.0.0.1:{ports['gcs']}"),
        *("--set", "resources.cpus_per_worker=8", "faults.node_wait_s=1"),
    )
    code, output = driver.run(*command, RAY_AUTH_MODE="disabled")
    assert code == 1, output
    assert "16 CPUs" in output
    assert "Traceback" not in output
    assert not run.events("training_started")
    assert "16 CPUs" in run.events("waiting")[-1]["what"]
    recorded = run.folder / "job.toml"
    assert not recorded.exists()  # its text may yet be refused, and mended
    recorded.write_text(load_job(run.job, ["train.steps=50"]).to_toml())
    assert driver.run(*command, RAY_AUTH_MODE="disabled")[0] == 1
    assert load_job(recorded).num_steps == driver.STEPS  # `dmuon resume` goes on with that one


def test_a_submitted_run_is_watched_refused_a_second_time_and_stopped_by_its_name(
    head, text, tmp_path
):
    env, ports = head
    server = ("--address", f"http://127.0.0.1:{ports['jobs']}")
    data = _prepared_by_the_cluster(text, tmp_path)
    submit = ("submit", "jobs/tiny_cpu.toml", *server, "--set", "name=watched", *data)
    changes = ("storage=watched-runs", "train.steps=100000")
    code, output = driver.run(*submit, *changes, RAY_AUTH_MODE="disabled")
    assert (code, "ignored by default" in output) == (0, False), output
    storage = Path(env["HOME"]) / "watched-runs"
    watched = driver.Run(tmp_path, storage / "watched")
    driver.wait_until(watched.metrics)
    code, told = _ask("status", *server)
    assert code == 3, told
    assert "  loss " in told
    assert "\x1b" not in told
    for where, words in {  # the job server knows, and the folder of the run
        "watched-runs": "watched is already running at http",
        storage: "already being run by",
    }.items():
        code, told = driver.run(*submit, f"storage={where}", RAY_AUTH_MODE="disabled")
        assert (code, words in told, "Submitted" in told) == (3, True, False), told
    code, told = driver.run("status", watched.folder, "--json")
    assert code == 3
    assert [worker["rank"] for worker in json.loads(told)["workers"]] == [0, 1]
    code, told = driver.run("status", "other", *server, RAY_AUTH_MODE="disabled")
    assert code == 66
    assert "has no job of a run 'other'. It has " in told
    assert "started anew has forgotten its jobs" in told
    assert _ask("stop", *server, "--wait")[0] == 0
    _submit_refused(server, *submit, *changes, "optimizer.lr=0.5")
    code, told = _ask("logs", *server)
    assert (code, "\x1b" in told, "Connected to Ray" in told) == (0, False, False), told
    assert "2 workers train from step 0" in told
    assert f"{' '.join(server)}` goes on" in driver.run("status", watched.folder)[1]
    assert _ask("status", "--storage", str(tmp_path / "elsewhere"))[0] == 66


def test_what_was_submitted_for_a_run_is_stopped_before_it_launches(head, text, tmp_path):
    env, _ = head
    run = driver.make_run(tmp_path, text)
    run.folder.mkdir(parents=True)
    with DriverLease(run.folder):  # an earlier launch, which did not come far
        Journal(run.folder).append("launched")
    server = ("--address", env["RAY_API_SERVER_ADDRESS"])
    changes = ("--set", f"name={run.folder.name}", f"storage={run.folder.parent}")
    code, told = driver.run(
        *("submit", "jobs/tiny_cpu.toml", *server, *changes, "train.steps=100000"),
        RAY_AUTH_MODE="disabled",
    )
    assert code == 0, told
    code, told = driver.run("stop", run.folder, "--wait", RAY_AUTH_MODE="disabled")
    assert (code, "of which no launch has begun: that is stopped" in told) == (0, True), told
    code, told = driver.run("status", run.folder)
    assert (code, "has ended (STOPPED), and no launch of it" in told) == (75, True), told
    assert not run.metrics()


def _submit_refused(server: tuple[str, str], *submit: str) -> None:
    """Submit what only the cluster can refuse: the run that is meant stays the one before."""
    code, told = driver.run(*submit, RAY_AUTH_MODE="disabled")
    assert code == 0, told
    driver.wait_until(lambda: "was refused: 'watched' was" in _ask("status", *server)[1])
    code, told = _ask("status", *server)
    assert (code, "watched: stopped" in told) == (78, True), told
    assert "optimizer.lr: 0.02 -> 0.5" in told


def _prepared_by_the_cluster(text: Path, folder: Path) -> tuple[str, str]:
    """Settings for a text that is much for a vocabulary, so that tasks of Ray Data divide it."""
    much, tokenizer = folder / "much.txt", folder / "tokenizer.json"
    much.write_text(text.read_text() * 8)
    assert much.stat().st_size > tokenise._GROUP_BYTES
    tokenizer.write_text(load_tokenizer(BYTES).to_json())
    return f"data.source={much}", f"data.tokenizer={tokenizer}"


def _ask(action: str, *arguments: str) -> tuple[int, str]:
    return driver.run(action, "watched", *arguments, RAY_AUTH_MODE="disabled")
