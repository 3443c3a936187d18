"""`dmuon status | logs | stop | resume | runs`: what they tell of whole and of torn files."""

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from dmuon_platform import cli, launch
from dmuon_platform.driver_lease import DriverLease
from dmuon_platform.events import Journal
from dmuon_platform.handover import leave_handover, newest_launch
from dmuon_platform.heartbeat import Heartbeat, Heartbeats, Phase
from dmuon_platform.line_file import LineFile
from dmuon_platform.remote_jobs import complaint, last_words, meant_of, refused_since, verdict
from dmuon_platform.run_ending import State
from dmuon_platform.run_report import plain, report
from dmuon_platform.run_state import read_run
from dmuon_platform.spec import JobSpec
from dmuon_platform.spool import MetricsSpool
from ray.job_submission import JobDetails, JobStatus, JobType
from small_job import small

STEPS = 40


def leave_run(storage: Path, name: str = "mine", steps: int = STEPS) -> Path:
    """Leave the files of a run that trained from the start, was killed, and went on."""
    spec = JobSpec.model_validate(small(name=name, storage=str(storage), train__steps=steps))
    spec.run_dir.mkdir(parents=True)
    (spec.run_dir / "job.toml").write_text(spec.to_toml())
    journal, spool = Journal(spec.run_dir), MetricsSpool(spec.run_dir)
    journal.append("launched", host="far", pid=7)
    workers = [{"host": "far", "pid": 8}, {"host": "far", "pid": 9}]
    journal.append("training_started", attempt=1, step=0, workers=workers)
    for step in range(1, 31):
        metrics = {"train/loss": 1 / step, "speed/tokens_per_s": 100.0 + step}
        if step % 10 == 0:
            metrics["evaluation/loss"] = 2 / step
            manifest = spec.run_dir / "checkpoints" / f"step-{step:08d}" / "manifest.json"
            manifest.parent.mkdir(parents=True)
            manifest.write_text(json.dumps({"created": time.time()}))
            journal.append("checkpoint_saved", attempt=1, step=step)
        spool.append(step, metrics, time.time())
    journal.append("restarted", attempt=1, step=30, cause="rank 1 died", details="line 1\nline 2")
    return spec.run_dir


def beat_of(attempt: int, progress: float) -> Heartbeat:
    return Heartbeat(
        attempt=attempt,
        rank=0,
        host="far",
        pid=11,
        step=31,
        phase=Phase.DATA,
        count=1,
        progress=progress,
        time=progress,
    )


DRIVER = """
import sys, time
from pathlib import Path
from dmuon_platform.driver_lease import DriverLease
from dmuon_platform.stop_request import StopFile
folder = Path(sys.argv[1])
with DriverLease(folder) as lease:
    print("on", flush=True)
    while (request := StopFile(folder).read(lease.launch)) is None:
        time.sleep(0.05)
print(request.reason)
"""


@contextmanager
def driver_of(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the run, until it is asked to stop."""
    command = [sys.executable, "-c", DRIVER, str(folder)]
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert driver.stdout is not None
    try:
        assert driver.stdout.readline() == "on\n"
        yield driver
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()


def dmuon(*arguments: object) -> int:
    return cli.main([str(each) for each in arguments])


@pytest.mark.parametrize(
    ("events", "state", "code"),
    [
        ([("finished", {"steps": STEPS}), ("ended", {"exit_code": 0})], State.FINISHED, 0),
        ([("finished", {"steps": STEPS})], State.FINISHED, 0),
        ([("finished", {"steps": STEPS}), ("launched", {})], State.FINISHED, 0),
        ([("finished", {"steps": STEPS}), ("ended", {"exit_code": 75})], State.FINISHED, 0),
        ([("finished", {"steps": 30}), ("ended", {"exit_code": 0})], State.STOPPED, 75),
        ([("finished", {"steps": 30}), ("launched", {})], State.INTERRUPTED, 75),
        ([("ended", {"exit_code": 75, "problem": "asked"})], State.STOPPED, 75),
        ([("ended", {"exit_code": 130, "problem": "Ctrl-C"})], State.STOPPED, 75),
        ([("ended", {"exit_code": 86, "problem": "NaN"})], State.FAILED, 86),
        ([("ended", {"exit_code": 1, "problem": "gave up"})], State.FAILED, 1),
        ([("ended", {"exit_code": "one"})], State.FAILED, 1),
        ([], State.INTERRUPTED, 75),
    ],
)
def test_every_end_has_its_state_and_an_exit_code_for_a_scheduler(tmp_path, events, state, code):
    folder = leave_run(tmp_path)
    for kind, facts in events:
        Journal(folder).append(kind, **facts)
    assert read_run(folder).state is state
    assert dmuon("status", "mine", "--storage", tmp_path) == code


def test_what_would_go_on_with_a_run_can_be_typed_where_it_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for storage, words in ("runs", "mine"), ("a b", f"mine '--storage={tmp_path / 'a b'}'"):
        leave_run(Path(storage))
        assert dmuon("status", "mine", "--storage", storage) == 75
        assert f"`dmuon resume {words}` goes on with it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("server", "way"),
    [
        (None, "submit its job again, which ran as raysubmit_1"),
        ("http://h:8265", "`dmuon resume mine --storage={} --address http://h:8265` goes on with"),
    ],
)
def test_a_run_of_a_cluster_goes_on_there(server, way, tmp_path, capsys):
    with DriverLease(leave_run(tmp_path), "10.0.0.1:6379", "raysubmit_1", server):
        pass
    assert dmuon("status", "mine", "--storage", tmp_path) == 75
    assert f"mine: interrupted; {way.format(tmp_path)}" in capsys.readouterr().out


def test_what_mlflow_was_not_told_comes_with_the_next_launch(tmp_path, capsys):
    folder = leave_run(tmp_path)
    (folder / "tracking").mkdir()
    delivered = {"uri": "http://h:1", "run_id": "y", "problem": "h is away"}
    (folder / "tracking" / "delivered.json").write_text(json.dumps(delivered))
    dmuon("status", folder)
    told = "y; not all is told: h is away; the rest is told when"
    assert f"{told} the run is launched again, also a finished one" in capsys.readouterr().out
    with driver_of(folder):
        dmuon("status", folder)
        assert f"{told} it can be" in capsys.readouterr().out


def test_a_running_run_is_told_stopped_and_found_dead_when_killed(tmp_path, capsys):
    folder = leave_run(tmp_path)
    Journal(folder).append("training_started", attempt=2, step=30, workers=[])
    Heartbeats(folder).write(beat_of(attempt=2, progress=time.time() - 100))
    with driver_of(folder) as driver:
        assert dmuon("status", folder, "--json") == 3
        told = json.loads(capsys.readouterr().out)
        assert told["state"] == "running"
        assert told["driver"]["pid"] == driver.pid
        assert [worker["pid"] for worker in told["workers"]] == [11]
        assert dmuon("status", folder) == 3
        shown = capsys.readouterr().out
        said = r"rank 0 +process 11 on far, step 31, data, 1 min \d+ s ago, no progress for 1 min"
        assert re.search(said, shown)
        assert re.search(r"^step +30 of 40 \(75.0 %\), \d+ s ago$", shown, re.M)
        for kind in ("restarted", "stopped", "launched"):
            Journal(folder).append(kind, attempt=2)
            assert read_run(folder).workers == []  # what dead ones have left is not told
        Heartbeats(folder).write(beat_of(attempt=3, progress=time.time()))
        assert len(read_run(folder).workers) == 1
        driver.kill()
        driver.wait()
        assert read_run(folder).state is State.INTERRUPTED
        assert dmuon("stop", folder) == 0
        assert not (folder / "stop.json").exists()  # the next launch must not find it
    with driver_of(folder) as driver:
        assert dmuon("stop", folder, "--wait", "--reason", "a talk at noon") == 0
        assert driver.communicate()[0] == "a talk at noon\n"
    assert "has ended: interrupted" in capsys.readouterr().out  # this driver notes nothing


def test_a_run_that_starts_has_no_job_yet_and_nothing_wrong_with_it(tmp_path):
    Journal(tmp_path).append("launched", host="far", pid=7)
    with driver_of(tmp_path):
        starting = read_run(tmp_path)
        assert (starting.state, starting.num_steps, starting.notes) == (State.RUNNING, None, [])
        Journal(tmp_path).append("training_started", attempt=1, step=0, workers=[])
        (note,) = read_run(tmp_path).notes
        assert "job.toml cannot be read" in note


def test_a_run_that_was_killed_before_its_job_was_recorded_is_not_said_to_resume(tmp_path, capsys):
    Journal(tmp_path).append("launched", host="far", pid=7)
    assert dmuon("status", tmp_path) == 75
    told = capsys.readouterr().out
    assert "interrupted; run its job again" in told
    assert "cannot be read" not in told  # nothing of it was lost
    assert dmuon("resume", tmp_path) == 78
    assert "Run the job file again" in capsys.readouterr().err


def test_a_run_that_waits_for_room_says_for_what(tmp_path, capsys):
    folder = leave_run(tmp_path)
    Journal(folder).append("waiting", what="2 workers need 2 CPUs")
    with driver_of(folder):
        assert dmuon("status", "mine", "--storage", tmp_path) == 3
        assert "mine: running; waiting for room: 2 workers need 2 CPUs" in capsys.readouterr().out
        assert dmuon("logs", "mine", "--storage", tmp_path) == 0
        assert "waiting for room: 2 workers need" in capsys.readouterr().out
        Journal(folder).append("training_started", attempt=2, step=30, workers=[])
        assert dmuon("status", "mine", "--storage", tmp_path) == 3
        assert "waiting" not in capsys.readouterr().out


def test_status_tells_the_newest_of_everything(tmp_path, capsys):
    folder = leave_run(tmp_path)
    assert dmuon("status", "mine", "--storage", tmp_path, "--json") == 75
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["num_steps"], told["loss"]) == (30, STEPS, 1 / 30)
    assert told["evaluation"] == {"step": 30, "evaluation/loss": 2 / 30}
    assert told["tokens_per_s"] == 115.5
    assert told["checkpoint"]["step"] == 30
    assert [(each["step"], each["cause"]) for each in told["restarts"]] == [(30, "rank 1 died")]
    bits = {"evaluation/bits_per_byte": 2.5, "evaluation/bigram_bits_per_byte": 3.0}
    MetricsSpool(folder).append(30, bits, time.time())  # of a step that was done again
    MetricsSpool(folder).append(31, {"evaluation/loss": 0.5, **bits}, time.time())
    assert dmuon("status", "mine", "--storage", tmp_path) == 75
    assert (
        "evaluation   loss 0.5000, 2.500 bits per byte (a bigram model has 3.000) at step 31\n"
        in re.sub("evaluation +", "evaluation   ", capsys.readouterr().out)
    )
    Journal(folder).append("training_started", attempt=2, step=20, workers=[])
    again = read_run(folder)
    assert again.step == 20  # it went back, and has not repeated a step yet
    assert again.metrics["train/loss"] == 1 / 20
    assert again.evaluation == {"step": 20, "evaluation/loss": 2 / 20}
    MetricsSpool(folder).append(21, {"train/loss": 1 / 21}, time.time())
    again = read_run(folder)
    assert (again.step, again.metrics["train/loss"]) == (21, 1 / 21)
    MetricsSpool(folder).append(32, {"train/loss": 5.0}, time.time())
    assert read_run(folder).metrics == {"train/loss": 5.0}


def test_the_time_left_is_that_of_the_steps_of_this_attempt(tmp_path):
    folder = leave_run(tmp_path)
    Journal(folder).append("training_started", attempt=2, step=30, workers=[])
    spool, start = MetricsSpool(folder), time.time()
    for step in (31, 32, 33):
        spool.append(step, {"train/loss": 1.0}, start + 5 * step)
    with driver_of(folder):
        assert read_run(folder).eta_s == pytest.approx(5 * (STEPS - 33))
    assert read_run(folder).eta_s is None


def test_logs_tell_the_journal_and_what_workers_said(tmp_path, capsys):
    folder = leave_run(tmp_path)
    Journal(folder).append("of_another_version", answer=42, plan={"left": "out"})
    (folder / "stacks").mkdir()
    (folder / "stacks" / "attempt-1-rank-00001.txt").touch()
    assert dmuon("logs", "mine", "--storage", tmp_path) == 0
    *lines, stacks = capsys.readouterr().out.splitlines()
    assert stacks.endswith(f"{folder}/stacks/attempt-1-rank-00001.txt")
    texts = [line.partition("  ")[2] for line in lines]
    assert texts[:2] == ["launched: process 7 on far", "2 workers train from step 0"]
    assert texts[-4:-1] == ["restart after step 30: rank 1 died", "  line 1", "  line 2"]
    assert texts[-1] == "of another version answer=42"


def test_a_reader_that_has_seen_enough_is_no_bug(tmp_path):
    folder = leave_run(tmp_path)
    line = json.dumps({"kind": "checkpoint_saved", "time": 1.0, "step": 1})
    (folder / "events.jsonl").write_text(f"{line}\n" * 5000)  # more than a pipe holds
    command = [sys.executable, "-m", "dmuon_platform.cli", "logs", str(folder)]
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_runs_lists_every_run_and_nothing_else(tmp_path, capsys):
    leave_run(tmp_path, "a")
    leave_run(tmp_path, "b")
    (tmp_path / "data").mkdir()
    assert dmuon("runs", "--storage", tmp_path) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in table[1:]] == [
        ["a", "interrupted", "30/40"],
        ["b", "interrupted", "30/40"],
    ]
    assert dmuon("status", "c", "--storage", tmp_path) == 66
    assert "It has a, b." in capsys.readouterr().err


def test_resume_launches_the_recorded_job_where_its_folder_is_now(tmp_path, monkeypatch):
    launched: list[JobSpec] = []
    monkeypatch.setattr(launch, "run_job", launched.append)
    leave_run(tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "now")
    assert dmuon("resume", "mine", "--storage", tmp_path / "now", "--set", "train.steps=50") == 0
    (job,) = launched
    assert (job.run_dir, job.num_steps) == (tmp_path / "now" / "mine", 50)


@pytest.mark.parametrize(
    ("ray", "told"),
    [
        (("PENDING", None), (State.RUNNING, 3)),
        (("RUNNING", None), (State.RUNNING, 3)),
        (("SUCCEEDED", 0), (State.FINISHED, 0)),
        (("STOPPED", None), (State.STOPPED, 75)),
        (("FAILED", 75), (State.STOPPED, 75)),
        (("FAILED", 130), (State.STOPPED, 75)),
        (("FAILED", 86), (State.FAILED, 86)),
        (("FAILED", -9), (State.INTERRUPTED, 75)),
        (("FAILED", 137), (State.INTERRUPTED, 75)),
        (("FAILED", 3), (State.REFUSED, 1)),
        (("FAILED", 66), (State.REFUSED, 66)),
        (("FAILED", 78), (State.REFUSED, 78)),
        (("FAILED", None, "JOB_SUPERVISOR_ACTOR_DIED"), (State.INTERRUPTED, 75)),
        (("FAILED", None, "RUNTIME_ENV_SETUP_FAILURE"), (State.FAILED, 1)),
    ],
)
def test_a_remote_job_is_told_like_a_run_in_a_folder(ray, told):
    status, *rest = ray
    assert verdict(JobStatus(status), *rest) == told


def test_what_a_job_has_printed_is_shown_without_colours_and_where_ray_says_it():
    place = "2026-11-30 10:00:01,123\tINFO job_manager.py:568 -- "
    said = f"{place}\x1b[1mRuntime env\x1b[22m is set up.\n"
    assert last_words(f"step 1\n{said}\n \n") == "Runtime env is set up."
    assert last_words("\x1b[36m(pid=1)\x1b[0m step 2/9  loss 1.0\n") == "(pid=1) step 2/9  loss 1.0"
    assert last_words("\n") is None
    assert last_words(f"{said}Running entrypoint for job raysubmit_1: python train.py\n") is None
    assert complaint("dmuon: a\nstep 1\ndmuon: \x1b[1mwrong:\n  x\nGo.\n") == "wrong: x Go."
    assert (complaint("step 1\nKilled\n"), complaint("")) == ("Killed", None)


OBEYED = (
    "\x1b[2J",
    "\x1b[38:5:1m",
    "\x9b31m",
    "\x1b[?25l",
    "\x1b(B",
    "\x1b]0;title\x07",
    "\x1b]8;;http://far\x1b\\",
    "\x9d0;title\x9c",
    "\x1bP1$q\x1b\\",
    "\x1bc",
    "\x08",
    "\x7f",
    "\u202e",
    "\u2066",
)


@pytest.mark.parametrize("control", OBEYED)
def test_nothing_that_others_wrote_steers_the_terminal(control, tmp_path, capsys):
    assert last_words(f"step{control} 1\t2{control}\n") == "step 1\t2"
    folder = leave_run(tmp_path)
    journal, text = Journal(folder), f"a{control}b {control} c"
    journal.append("tracking_failed", problem=text)
    journal.append("restarted", step=30, cause=text, details=f"{text}\nd")
    assert (dmuon("logs", folder), dmuon("status", folder)) == (0, 75)
    said = capsys.readouterr().out
    assert control not in said
    assert "now: ab c; the run" in said
    assert "after step 30: ab c\n    ab  c\n    d\n" in said
    assert "title" not in said


@pytest.mark.parametrize(
    ("jobs", "meant"),
    [
        ([("SUCCEEDED", 1), ("FAILED", 2), ("STOPPED", 3)], 3),
        ([("RUNNING", 1), ("FAILED", 2)], 1),
        ([("RUNNING", 1), ("PENDING", 2)], 1),
        ([("FAILED", 1), ("PENDING", None)], None),
        ([("SUCCEEDED", 1), ("FAILED", 2, 3)], 1),
        ([("SUCCEEDED", 1), ("FAILED", 2, 78), ("FAILED", 3, 66)], 1),
        ([("FAILED", 1, 3), ("FAILED", 2, 3)], 2),
    ],
)
def test_of_several_submissions_of_a_run_one_that_runs_is_meant(jobs, meant):
    assert meant_of([submission(*job) for job in jobs]).start_time == meant


def test_a_submission_that_was_refused_is_told_beside_the_one_that_is_meant():
    jobs = [("FAILED", 1, 78), ("SUCCEEDED", 2, 0), ("FAILED", 3, 78), ("FAILED", 4, 3)]
    first, done, *_, newest = details = [submission(*job) for job in jobs]
    assert refused_since(done, details) is newest
    assert refused_since(done, [first, done]) is None


def submission(status: str, started: int | None, code: int | None = None) -> JobDetails:
    return JobDetails(
        type=JobType.SUBMISSION,
        entrypoint="x",
        status=JobStatus(status),
        start_time=started,
        driver_exit_code=code,
    )


@pytest.mark.parametrize("action", ["status", "logs", "stop", "runs"])
def test_looking_at_runs_needs_neither_torch_nor_ray(tmp_path, action):
    leave_run(tmp_path)
    arguments = [action, *(["mine"] if action != "runs" else []), "--storage", str(tmp_path)]
    program = (
        "import sys; from dmuon_platform.cli import main; main(sys.argv[1:])\n"
        "assert not {'torch', 'ray', 'mlflow', 'numpy', 'rich'} & set(sys.modules), 'slow'"
    )
    command = [sys.executable, "-c", program, *arguments]
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def with_nonsense(content: bytes, chance: random.Random) -> bytes:
    """Some of the numbers and texts replaced by what JSON has too."""
    nonsense = (
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"-1",
        b"9" * 25,
        b"9" * 400,
        b'"x"',
        b"null",
        b"[]",
        b"{}",
    )

    def other(found: re.Match[bytes]) -> bytes:
        return chance.choice(nonsense) if chance.random() < 0.2 else found[0]

    return re.sub(rb'(?<=: )("[^"]*"|[-\d.e]+)', other, content)


def test_whatever_is_cut_or_damaged_a_run_can_still_be_told(tmp_path, capsys):
    folder = leave_run(tmp_path)
    with driver_of(folder):
        pass
    Heartbeats(folder).write(beat_of(attempt=1, progress=1.0))
    (folder / "tracking").mkdir()
    (folder / "tracking" / "delivered.json").write_text('{"uri": 7, "run_id": 7, "problem": 7}')
    assert dmuon("status", folder) == 75
    (folder / "tracking" / "delivered.json").write_text('{"uri": "x", "run_id": "y"}')
    (folder / "stop.json").write_text('{"launch": 1}')
    leave_handover(folder, "raysubmit_1", "http://far:8265", newest_launch(folder))
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    whole = {path: path.read_bytes() for path in files}
    assert len(whole) > 8
    chance = random.Random(0)
    for path, content in whole.items():
        for _ in range(25):
            cut = content[: chance.randrange(len(content))]
            flipped = bytearray(content)
            for _ in range(chance.randrange(1, 5)):
                flipped[chance.randrange(len(content))] = chance.choice(b'\x00\xff"{}[]9n\n')
            deep = b"[" * 100_000 + b"\n"
            others = [cut, bytes(flipped), with_nonsense(content, chance), deep]
            path.write_bytes(chance.choice(others))
            run = read_run(folder)
            report(run, time.time())
            json.dumps(plain(run, time.time()), allow_nan=False)
            assert dmuon("logs", folder) == 0
        path.write_bytes(content)
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    for path in files:
        path.unlink()
    assert dmuon("status", folder) == 66


def test_numbers_that_are_none_take_no_other_line_away(tmp_path, capsys):
    folder = leave_run(tmp_path)
    journal, huge = Journal(folder), int("9" * 400)
    for facts in ({"loss": None}, {"loss": []}, {"loss": huge}, {"loss": 1, "bits_per_byte": huge}):
        journal.append("evaluated", step=0, **facts)
    journal.append("finished", steps=40, bits_per_byte=None)
    LineFile(folder / "metrics.jsonl").append({"step": huge, "time": 1.0, "metrics": {"a": huge}})
    assert dmuon("logs", folder) == 0
    *_, _, nothing, huge_loss, evaluated, finished = capsys.readouterr().out.splitlines()
    assert nothing.endswith("  evaluated step=0")
    assert huge_loss.endswith(f"  evaluated step=0 loss={huge}")
    assert evaluated.endswith("  evaluation before the first step: loss 1.0000")
    assert finished.endswith("  finished steps=40")
    for action in ("status", "report"):
        assert dmuon(action, folder) == 0
    assert "30 of 40" in capsys.readouterr().out


def test_a_recorded_job_that_cannot_be_read_is_named_by_resume(tmp_path, capsys):
    folder = leave_run(tmp_path)
    (folder / "job.toml").write_text("[model")
    assert dmuon("resume", folder) == 78
    assert "job.toml" in capsys.readouterr().err


def test_what_cannot_be_read_is_an_error_in_words_and_hides_no_other_run(tmp_path, capsys):
    folder = leave_run(tmp_path, "a")
    leave_run(tmp_path, "b")
    (folder / "events.jsonl").unlink()
    (folder / "events.jsonl").mkdir()
    for action in ("status", "logs", "resume"):
        assert dmuon(action, folder) == 1
        printed = capsys.readouterr().err
        assert "Traceback" not in printed
        assert re.search(f"^dmuon: {folder} cannot be (read|used).*Is a directory", printed)
    assert dmuon("runs", "--storage", tmp_path) == 0
    table, note = capsys.readouterr()
    assert [line.split()[0] for line in table.splitlines()] == ["NAME", "b"]
    assert note.startswith(f"note: {folder} cannot be read")
    other = tmp_path / "b"
    (other / "checkpoints").rename(other / "moved")
    (other / "checkpoints").touch()
    assert dmuon("resume", other) == 1  # before it trains for what it cannot save
    assert f"{other}/checkpoints cannot be written (File exists)" in capsys.readouterr().err


def test_the_newest_lines_come_first_over_any_block_size(tmp_path, monkeypatch):
    file = LineFile(tmp_path / "lines.jsonl")
    for number in range(20):
        file.append({"number": number, "text": "é" * number})
    with file.path.open("ab") as torn:
        torn.write(b'nothing\n[1]\n\n{"number": 99')
    forwards = [line.content for line in file.lines()]
    for size in (1, 7, 64, 4096):
        monkeypatch.setattr("dmuon_platform.line_file.SCAN_BYTES", size)
        assert list(file.newest_first()) == forwards[::-1]
