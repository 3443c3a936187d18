"""The report of a run: its numbers are those of the run's lines, whatever state the run is in."""

import time
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from browser import browser, installed
from dmuon_platform import cli
from dmuon_platform.driver_lease import DriverLease
from dmuon_platform.errors import ClusterLost, GracefulStop
from dmuon_platform.events import Journal
from dmuon_platform.health import Grade, findings_of, verdict
from dmuon_platform.run_ending import State
from dmuon_platform.run_history import read_history
from dmuon_platform.spool import METRICS_FILE, MetricsSpool
from dmuon_platform.update_table import UPDATES_FILE
from report_runs import (
    NAMES,
    STEPS,
    begin,
    end,
    finish,
    launch_and_start,
    restart,
    start,
    stop,
    train,
    updates,
)

ODD = """<img src=x onerror=alert(1)> & "it's" $x^2$ 名"""
VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """What a reader sees: texts, and tables by the heading above them; tags must fit."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[str] = []
        self.references: list[str] = []
        self._heading = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [v or "" for k, v in attrs if k in ("src", "href", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.setdefault(self._heading, [])
        elif tag == "tr":
            self.tables[self._heading].append([])
        elif tag in ("td", "th"):
            self.tables[self._heading][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] == "style":
            return
        self.texts.append(data.strip())
        if {"h1", "h2"} & set(self.open):
            self._heading = data.strip()
        if {"td", "th"} & set(self.open):
            self.tables[self._heading][-1][-1] += data.strip()

    @property
    def text(self) -> str:
        return "\n".join(filter(None, self.texts))


def report(folder: Path, *options: str) -> Page:
    assert cli.main(["report", str(folder), *options]) == 0
    return Page((folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """It trained, lost a worker, repeated steps, and finished."""
    folder = tmp_path / "runs" / "mine"
    begin(folder)
    start(folder, 0)
    train(folder, range(1, 31))
    restart(folder, 30, "rank 1 <died> & was 'gone'")
    start(folder, 20, attempt=2)
    train(folder, range(21, STEPS + 1))
    finish(folder)
    return folder


def test_the_numbers_are_those_of_the_lines_of_the_run(run: Path, capsys) -> None:
    page = report(run)
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    newest = next(MetricsSpool(run).newest_first(STEPS)).metrics
    for told in (
        f"steps of {STEPS}",
        f"{STEPS * 32 * 128:,}",
        f"{newest['train/loss']:.4f}",
        f"{newest['evaluation/loss']:.4f}",
        "8,192",  # median tokens a second
    ):
        assert told in page.texts, told
    assert "finished" in page.texts
    assert "Muon and training: healthy" in page.texts
    assert "1 x 2 (replicate x shard), 2 workers" in page.texts
    cause = "The newest failure, after step 30: rank 1 <died> & was 'gone'."
    assert f"The training was started again once after a fault. {cause}" in page.text
    assert "All 10 repeated steps had the same numbers bit for bit." in page.texts

    rows = page.tables[f"Updates of the matrices at step {STEPS}"][1:]
    assert [row[0] for row in rows] == list(NAMES)  # layer 10 after layer 2
    for row, (name, seen) in zip(rows, updates(STEPS).rows.items(), strict=True):
        owner = "1" if name == NAMES[1] else "0"
        numbers = [f"{seen.spectral_norm:.3f}", f"{seen.orthogonality_error:.3f}"]
        assert row[1:5] == ["24 x 32", owner, *numbers]
        assert row[7:] == [f"{seen.update_rms / seen.weight_rms:.3g}", "good"]
    starts = page.tables["Starts of the training"][1:]
    assert [row[2:4] for row in starts] == [["0", "2"], ["20", "2"]]
    assert starts[0][5] == "failed after step 30: rank 1 <died> & was 'gone'"
    assert starts[1][4:] == ["the same launch, after the failure", f"trained to step {STEPS}"]
    first, last = (1 + 4 / step for step in (1, STEPS))
    steps = f"The training loss was {first:.3f} in the first step, and {last:.3f} in the last."
    assert steps in page.text
    first, last = (fmean(1 + 4 / step for step in tenth) for tenth in (range(1, 7), range(55, 61)))
    tenths = f"The training loss fell: {first:.3f} on average in the first tenth of the steps, "
    assert f"{tenths}{last:.3f} in the last." in page.texts
    assert [row[1:3] for row in page.tables["Owners"][1:]] == [["2", "2.0"], ["1", "1.0"]]
    assert page.tags.count("svg") == page.tags.count("figure") == 10
    assert page.text.count("began again (1 x)") == 8  # in every picture over the steps
    assert "Damaged or missing" not in page.texts


def test_what_it_started_from_is_told_in_the_units_of_what_it_came_to(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    begin(folder)
    start(folder, 0)
    MetricsSpool(folder).append(
        0, {"evaluation/loss": 5.975, "evaluation/bits_per_byte": 3.816}, time.time()
    )
    train(folder, range(1, STEPS + 1))
    finish(folder)
    assert "(step 60); before the first step 5.975, 3.816 bits per byte." in report(folder).text


def test_each_start_tells_how_it_ended_and_none_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    begin(folder)
    start(folder, 0)
    stop(folder, 9, "Ctrl-C")
    end(folder, GracefulStop("Stopped after step 9 (Ctrl-C), with a checkpoint."))
    launch_and_start(folder, 9)
    end(folder, KeyboardInterrupt())
    launch_and_start(folder, 9)
    stop(folder, 15, "Ctrl-C")
    end(folder, KeyboardInterrupt())
    launch_and_start(folder, 15)  # and it is killed
    launch_and_start(folder, 15)
    stop(folder, 20, "there is room for more workers", "restart")
    start(folder, 20)
    restart(folder, 25, "rank 1 died\nof this and that")
    restart(folder, 25, "no worker has been heard of")
    start(folder, 25)
    end(folder, ClusterLost("The cluster is gone.\nRun the job again when there is one."))
    Journal(folder).append("launched", host="far", pid=7)
    end(folder, GracefulStop("Stopped by SIGTERM."))
    launch_and_start(folder, 25, "train.steps: 40 -> 50", "mesh.shard: 2 -> 4")

    rows = report(folder).tables["Starts of the training"]
    gone = "its command left no word: killed, or its machine lost"
    at_once = "ended at once by Ctrl-C, while it was stopping"
    assert [row[4:] for row in rows] == [
        ["began", "ended"],
        ["launched", "stopped after step 9: Ctrl-C, with a checkpoint"],
        ["launched again", at_once],
        ["launched again", f"stopped after step 15: Ctrl-C, with a checkpoint; {at_once}"],
        ["launched again", gone],
        [
            "launched again",
            "stopped after step 20: there is room for more workers, with a checkpoint",
        ],
        ["the same launch, as planned", "failed after step 25: rank 1 died"],
        [
            "the same launch, after the failure; before, without a start: failed after step 25: "
            "no worker has been heard of",
            "The cluster is gone.",
        ],
        [
            "launched again; the job has changed: train.steps: 40 -> 50, mesh.shard: 2 -> 4; "
            "before, without a start: Stopped by SIGTERM.",
            gone,
        ],
    ]
    with DriverLease(folder):
        assert report(folder).tables["Starts of the training"][-1][5] == "goes on"
    Journal(folder).append("trained", attempt=1, step=STEPS)
    assert report(folder).tables["Starts of the training"][-1][5] == f"trained to step {STEPS}"


def test_a_page_refers_to_nothing_and_runs_nothing(run: Path) -> None:
    page = report(run)
    assert {each for each in page.references if not each.startswith("#")} == {"data:,"}
    assert not {"script", "img", "iframe", "object", "foreignobject"} & set(page.tags)
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    begin(folder)
    page = report(folder)
    assert "No step is done yet: there is nothing to draw." in page.texts
    assert "interrupted" in page.texts
    assert "Muon and training: not enough to judge" in page.texts
    assert "svg" not in page.tags
    start(folder, 0)
    with DriverLease(folder):
        assert "running" in report(folder).texts


def test_a_failed_run_is_not_healthy_and_tells_why(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    begin(folder)
    start(folder, 0)
    train(folder, range(1, 31))
    MetricsSpool(folder).append(31, {"train/loss": float("nan")}, time.time())
    Journal(folder).append("ended", exit_code=86, problem="Step 31 diverged: loss nan")
    page = report(folder)
    assert "failed" in page.texts
    assert "Muon and training: not healthy" in page.texts
    assert "Step 31 diverged: loss nan" in page.texts
    assert "The training loss is nan at step 31." in page.texts


@pytest.mark.parametrize(
    ("worst", "grade", "reason"),
    [
        (0.4, Grade.GOOD, "Updates are close to orthogonal"),
        (0.9, Grade.LOOK, f"In {NAMES[-1]} fewer than half of the directions"),
        (float("nan"), Grade.BAD, f"Newton-Schulz does not orthogonalise {NAMES[-1]}"),
    ],
)
def test_the_verdict_follows_from_the_updates(tmp_path: Path, worst, grade, reason) -> None:
    start(tmp_path, 0)
    train(tmp_path, range(1, STEPS + 1), worst)
    findings = findings_of(read_history(tmp_path), State.FINISHED, None)
    assert verdict(findings) is grade
    assert any(each.text.startswith(reason) and each.grade is grade for each in findings)


def test_a_long_run_that_was_started_often_says_what_it_leaves_out(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    begin(folder, steps=5000)
    for number in range(120):
        start(folder, 40 * number, attempt=number + 1)
        Journal(folder).append("launched", host="far", pid=7)
    train(folder, range(1, 5001))
    page = report(folder)
    assert page.text.count("Of 5,000 steps, each point is the mean of 5 neighbours") == 5
    assert "Shown are 100 of 120 starts, the newest." in page.texts
    assert page.tables["Starts of the training"][-1][0] == "120"
    assert (folder / "report.html").stat().st_size < 2_000_000


def test_damaged_lines_are_named_and_the_others_told(run: Path) -> None:
    for name in (METRICS_FILE, UPDATES_FILE, "events.jsonl"):
        lines = (run / name).read_bytes().splitlines(keepends=True)
        lines[3] = b'{"step": 4, "metr\n'
        lines[4:4] = [b'{"step": "x", "metrics": {"train/loss": "y"}, "time": 1}\n']
        (run / name).write_bytes(b"".join(lines))
    (run / "job.toml").write_text("name = ")
    page = report(run)
    assert "Damaged or missing" in page.texts
    for name in (METRICS_FILE, UPDATES_FILE, "events.jsonl"):
        assert any(f"{run / name}: the line" in text for text in page.texts), name
    assert any("job.toml cannot be read" in text for text in page.texts)
    assert f"{1 + 4 / STEPS:.4f}" in page.texts


def test_what_is_no_run_and_a_place_that_cannot_be_written_are_refused(run: Path, capsys) -> None:
    assert cli.main(["report", "nothing", "--storage", str(run.parent)]) == 66
    assert "There is no run 'nothing'" in capsys.readouterr().err
    assert cli.main(["report", str(run), "--out", str(run / "no" / "r.html")]) == 1
    assert f"there is no folder {run / 'no'}. --out names" in capsys.readouterr().err
    assert cli.main(["report", str(run), "--out", str(run)]) == 1
    assert f"{run} is a folder. --out names a file" in capsys.readouterr().err
    assert cli.main(["report", str(run), "--out", str(run.parent / "r.html")]) == 0
    assert (run.parent / "r.html").exists()
    assert not (run / "report.html").exists()


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / ODD
    begin(folder)
    start(folder, 0)
    train(folder, range(1, STEPS + 1))
    restart(folder, STEPS, "<script>alert(2)</script>")
    return folder


def test_a_name_of_markup_is_text(odd: Path) -> None:
    page = report(odd)
    assert page.texts.count(ODD) == 1  # the heading
    assert "img" not in page.tags
    assert "script" not in page.tags


@pytest.mark.skipif(installed() is None, reason="no Chromium or Chrome is installed")
def test_a_real_browser_shows_it_without_a_request_or_a_complaint(odd: Path) -> None:
    report(odd)
    with browser() as page:
        for dark in (False, True):
            assert_shown(page, odd, dark=dark)


def assert_shown(page: Any, folder: Path, *, dark: bool) -> None:
    address = (folder / "report.html").as_uri()
    page.requests.clear()
    page.open(address, dark=dark)
    assert page.trouble == []
    assert [each for each in page.requests if each != "data:,"] == [address]
    assert page.evaluate("document.title") == f"{folder.name}: report"
    text = page.evaluate("document.body.innerText")
    for part in (ODD, "Spectral norm of updates", *NAMES, f"{1 + 4 / STEPS:.4f}"):
        assert part in text
    sizes = page.evaluate(
        "[...document.querySelectorAll('svg')].map(s => [s.clientWidth, s.getBBox().height])"
    )
    assert len(sizes) == 10
    assert all(width > 300 and height > 100 for width, height in sizes)
    assert page.evaluate("[...document.images].every(i => i.naturalWidth > 0)")
    # no id twice, and whatever a picture refers to is in it
    assert page.evaluate(
        "new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size"
        " === document.querySelectorAll('[id]').length"
    )
    assert page.evaluate(
        "[...document.querySelectorAll('use')].every(u => "
        "document.getElementById(u.getAttribute('href').slice(1)))"
    )
    # ink and paper can be told apart
    colours = "[getComputedStyle(document.body).{}, getComputedStyle({}).{}]"
    text_of = "document.querySelector('svg text')"
    paper, ink = page.evaluate(colours.format("backgroundColor", text_of, "fill"))
    light = [sum(map(int, each[4:-1].split(","))) / 3 for each in (paper, ink)]
    assert (light[0] < 60 and light[1] > 180) if dark else (light[0] > 200 and light[1] < 80)
    for width in (1240, 400):
        page.open(address, dark=dark, width=width)
        overflow = "document.documentElement.scrollWidth - window.innerWidth"
        assert page.evaluate(overflow) <= 0, f"it is wider than {width} pixels"
