"""The process that tells MLflow what a run's files say; ``python -m dmuon_platform.drain RUN_DIR``.

It follows the files from outside the training and can be killed, started again, or be without a
server for hours: it goes on from what was told for certain. Its standard input is its life line:
``finish SECONDS`` asks for a last delivery within that time, an end of file means that the driver
is gone and there is no time to lose.
"""

import fcntl
import logging
import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from dmuon_platform.catalogue import CATALOGUE_FILE, Catalogue
from dmuon_platform.checkpoint_delivery import CheckpointCurve, CheckpointDelivery
from dmuon_platform.events import EVENTS_FILE, TRACKING_FAILED, TRACKING_WORKS, Journal
from dmuon_platform.export import read_export
from dmuon_platform.lineage import lineage_of
from dmuon_platform.metric_delivery import MetricDelivery, Records
from dmuon_platform.registry import register
from dmuon_platform.run_ending import State
from dmuon_platform.run_folder import PLOTS_FOLDER, REPORT_FILE
from dmuon_platform.run_story import plans_of, tags_of
from dmuon_platform.spec.uri import without_credentials
from dmuon_platform.spool import METRICS_FILE, MetricsSpool
from dmuon_platform.system_sampler import SYSTEM_FILE, SystemSampler
from dmuon_platform.tracked_run import TrackedRun, is_reachable, is_refused
from dmuon_platform.tracking_files import TrackingFiles
from dmuon_platform.update_table import UPDATES_FILE

EVERY_S = 1.0
MOST_S = 15.0
"""Between two tries while the server does not answer."""
DEAD_AFTER_S = 5.0
"""How long a server may not answer at the end before the drain leaves the rest for later."""
ORPHANED_S = 20.0
"""For the last delivery when the driver is gone."""

ENDINGS = {"FINISHED": State.FINISHED, "FAILED": State.FAILED, "KILLED": State.STOPPED}
"""How a run ends, by the status that its tracker shows then."""

LOGIN = (
    "If the server wants a user and a password, launch the run again with MLFLOW_TRACKING_USERNAME "
    "and MLFLOW_TRACKING_PASSWORD in its environment, or with them in tracking.uri of the job file"
)

_log = logging.getLogger("dmuon_platform.drain")


class Drain:
    """Tells one run's files to its tracker, each thing once."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files = TrackingFiles(run_dir)
        self._description = self._files.description()
        self._delivered = self._files.delivered()
        if self._delivered.uri != self._description.uri:  # another server knows nothing yet
            self._delivered = type(self._delivered)(uri=self._description.uri)
        self._sampler = SystemSampler(self._files.folder)
        self._run: TrackedRun | None = None
        self._curves: list[MetricDelivery] = []
        self._checkpoints: CheckpointDelivery | None = None
        self._tags: dict[str, str] = {}
        self._events_size = -1
        self._is_described = False
        self._drawn: str | None = None
        # what another launch has been told of, its end is told of by this one
        self._is_behind = self._delivered.problem is not None
        self._has_complained = False

    def sample(self) -> None:
        """Note how busy the machine is, if it is time."""
        self._sampler.sample()

    def draw(self) -> None:
        """Draw a run that ends into its folder, whether or not a tracker hears of it."""
        try:
            self._draw()
        except Exception:  # of a run that is over; `dmuon report` draws it too
            _log.exception("could not draw the run")

    def deliver(self) -> bool:
        """Tell everything that is not told yet; return whether nothing is left.

        A thing that the tracker refuses does not keep back the others; a tracker that does not
        answer is not asked further.
        """
        uri = self._description.uri
        if self._delivered.problem is not None and not is_reachable(uri):
            self._complain(self._delivered.problem)
            return False
        problem = None
        for what, tell in self._topics():
            try:
                tell()
            except Exception as error:  # a tracker may fail in any way, and never the training
                _log.exception("could not tell %s", what)
                problem = f"{what}: {type(error).__name__}: {error}"
                if is_refused(error):
                    problem = f"{problem}. {LOGIN}"
                if not is_reachable(uri):
                    problem = f"{uri} does not answer"
                    break
                if self._run is None:
                    break
        problem = None if problem is None else without_credentials(problem)
        self._complain(problem)
        self._delivered.problem = problem
        self._delivered.is_complete = problem is None
        with suppress(OSError):  # a full disk: what is told twice is not doubled
            self._files.save(self._delivered)
        return problem is None

    def _complain(self, problem: str | None) -> None:
        """Note in the journal, once each, that not all could be told and that all is told again."""
        if problem is not None and not self._has_complained:
            self._has_complained = self._is_behind = True
            Journal(self._run_dir).note(TRACKING_FAILED, problem=problem)
        elif problem is None and self._is_behind:
            self._has_complained = self._is_behind = False
            Journal(self._run_dir).note(TRACKING_WORKS, uri=self._description.uri)

    def _topics(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "the run", self._open
        yield "its description", self._tell_description
        yield "its metrics", self._tell_metrics
        yield "its attempts", self._tell_events
        yield "its checkpoints", self._tell_checkpoints
        yield "its model", self._tell_model
        yield "its plots", self._tell_plots
        yield "its status", self._tell_status
        yield "the files of its checkpoints", self._tell_files  # it may take long

    def _open(self) -> None:
        if self._run is not None:
            return
        run = TrackedRun(self._description)
        if self._delivered.run_id != run.run_id:
            fresh = type(self._delivered)(uri=self._description.uri)
            self._delivered = fresh
            self._delivered.run_id = run.run_id
            self._delivered.experiment_id = run.experiment_id
        curves: dict[str, Records] = {
            METRICS_FILE: MetricsSpool(self._run_dir),
            SYSTEM_FILE: self._sampler.spool,
            CATALOGUE_FILE: CheckpointCurve(Catalogue(self._run_dir)),
        }
        self._curves = [self._curve(name, records, run) for name, records in curves.items()]
        self._checkpoints = CheckpointDelivery(
            self._run_dir,
            run,
            self._delivered,
            lambda: self._files.save(self._delivered),
            self._description.checkpoint_artifacts,
        )
        self._run = run

    def _curve(self, name: str, records: Records, run: TrackedRun) -> MetricDelivery:
        def told(offset: int) -> None:
            self._delivered.offsets[name] = offset
            self._files.save(self._delivered)

        every = self._description.log_every if name == METRICS_FILE else 1
        return MetricDelivery(records, run, self._delivered.offsets.get(name, 0), told, every)

    @property
    def _tracked(self) -> TrackedRun:
        if self._run is None:
            raise RuntimeError("the run is not open")
        return self._run

    def _tell_description(self) -> None:
        if not self._is_described:
            self._tracked.describe()
            self._is_described = True

    def _tell_metrics(self) -> None:
        for curve in self._curves:
            curve.deliver()

    def _tell_events(self) -> None:
        size = _size(self._run_dir / EVENTS_FILE)
        if size == self._events_size:
            return
        events = Journal(self._run_dir).read()
        tags = tags_of(events, MetricsSpool(self._run_dir).continuation())
        self._tracked.set_tags({k: v for k, v in tags.items() if self._tags.get(k) != v})
        self._tags = tags
        for name, plan in plans_of(events).items():
            if name not in self._delivered.plans:
                self._tracked.log_json(plan, f"plan/{name}.json")
                self._delivered.plans.append(name)
        self._events_size = size

    def _tell_checkpoints(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.deliver_records()

    def _tell_files(self) -> None:
        if self._checkpoints is None:
            return
        told_at = time.monotonic()
        for _ in self._checkpoints.deliver_files():
            if time.monotonic() - told_at > EVERY_S:  # the rest does not wait for copies
                self._tell_metrics()
                self._tell_checkpoints()
                self._tell_status()
                told_at = time.monotonic()

    def _tell_model(self) -> None:
        name = self._description.model_name
        export = read_export(self._run_dir)
        if name is None or export is None or self._delivered.model.get("digest") == export.digest:
            return
        events = Journal(self._run_dir).read()
        facts = self._description.facts
        lineage = lineage_of(self._run_dir.resolve(), export, facts, events)
        alias = self._description.model_alias
        self._delivered.model = register(self._tracked, export, name, alias, lineage)

    def _draw(self) -> None:
        status, _ = self._files.wanted()
        mark = self._mark()
        if status == "RUNNING" or self._drawn == mark:
            return
        from dmuon_platform.plots import draw_plots  # matplotlib, once, at the end
        from dmuon_platform.report_page import write_report

        draw_plots(self._run_dir)
        write_report(self._run_dir, ended=(ENDINGS[status], self._files.problem()))
        self._drawn = mark

    def _mark(self) -> str:
        """Return what pictures depend on: the sizes of the files that they are drawn from."""
        names = (METRICS_FILE, UPDATES_FILE, EVENTS_FILE)
        return " ".join(str(_size(self._run_dir / name)) for name in names)

    def _tell_plots(self) -> None:
        status, _ = self._files.wanted()
        mark = self._mark()
        if status == "RUNNING" or self._delivered.plots == mark:
            return
        self._draw()
        self._tracked.log_folder(self._run_dir / PLOTS_FOLDER, PLOTS_FOLDER)
        self._tracked.log_file(self._run_dir / REPORT_FILE, "report")
        self._delivered.plots = mark

    def _tell_status(self) -> None:
        status, end_time_ms = self._files.wanted()
        if status != self._delivered.status:
            self._tracked.set_status(status, end_time_ms)
            self._delivered.status = status


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def serve(drain: Drain, orders: int) -> None:
    """Deliver until told to finish.

    Args:
        drain: What to do.
        orders: File descriptor of the driver's orders.
    """
    pause_s = EVERY_S
    deadline: float | None = None
    answered = closing = time.monotonic()
    while True:
        started = time.monotonic()
        complete = drain.deliver()
        if complete:
            answered = time.monotonic()
        pause_s = EVERY_S if complete else min(2 * pause_s, MOST_S)
        if deadline is not None:
            dead = time.monotonic() - max(answered, closing) > DEAD_AFTER_S
            if complete or dead or time.monotonic() > deadline:
                return
            time.sleep(EVERY_S)
            continue
        drain.sample()
        order = _order(orders, max(0.0, pause_s - (time.monotonic() - started)))
        if order is not None:
            deadline = time.monotonic() + order
            drain.draw()
            closing = time.monotonic()


def _order(orders: int, wait_s: float) -> float | None:
    """Wait for an order; return the seconds it leaves, None when there is none."""
    readable, _, _ = select.select([orders], [], [], wait_s)
    if not readable:
        return None
    words = os.read(orders, 100).split()
    return float(words[1]) if words[:1] == [b"finish"] else ORPHANED_S


class _Formatter(logging.Formatter):
    """Traces of MLflow name its URI as it was given."""

    def format(self, record: logging.LogRecord) -> str:
        return without_credentials(super().format(record))


def main(run_dir: Path) -> None:
    """Deliver one run; waits while another drain of it is at work."""
    files = TrackingFiles(run_dir)
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(asctime)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    with files.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(files.scratch, ignore_errors=True)
        files.scratch.mkdir(exist_ok=True)
        serve(Drain(run_dir), sys.stdin.fileno())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
