"""The metrics of a run, step by step, on disk: the truth that trackers are told from."""

import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmuon_platform.backlog import Backlog
from dmuon_platform.line_file import Line, LineFile
from dmuon_platform.metric_names import EVALUATION, SPEED, SYSTEM, TIME

METRICS_FILE = "metrics.jsonl"

MEASURED = (TIME, SPEED, SYSTEM)
"""Prefixes of what a clock measured: a replayed step may differ there and nowhere else."""

FORGOTTEN = "rolled_back_to"
"""Key of a line that says after which step those before it do not count."""

SYNC_EVERY_S = 1.0
"""What a crash of the whole machine may lose; the death of a process loses nothing."""


@dataclass(frozen=True)
class Record:
    """The metrics of one step."""

    step: int
    metrics: dict[str, float]
    time: float
    """Seconds since the epoch, when the step was done."""
    is_redone: bool = False
    """Whether it takes the place of an earlier record of the step, after a roll-back."""


@dataclass(frozen=True)
class Replay:
    """What a step that ran a second time, after a restart, shows about the continuation."""

    step: int
    differences: dict[str, tuple[float, float]]
    """Metrics that are not the same bits: what they were, what they are now."""

    @property
    def is_equal(self) -> bool:
        """Whether everything a clock did not measure came out the same, bit for bit."""
        return not self.differences


@dataclass(frozen=True)
class Continuation:
    """How many steps ran again over all attempts, and how many came out the same."""

    equal: int
    different: int


class MetricsSpool:
    """``metrics.jsonl`` of one run: every step once, whatever was restarted in between.

    One process appends, others read. A step that is already there is compared with what it was
    and not written again.
    """

    def __init__(self, run_dir: Path, file_name: str = METRICS_FILE) -> None:
        self._file = LineFile(run_dir / file_name)
        self._starts: dict[int, int] | None = None  # of lines by step; read by the first append
        self._forgotten: set[int] = set()  # steps whose lines do not count, and are not redone yet
        self._waiting = Backlog(self._file, self._note_start)
        self._synced_at = 0.0

    def append(self, step: int, metrics: Mapping[str, float], wall_time: float) -> Replay | None:
        """Write the metrics of ``step``; never fails a training.

        On a full disk the lines wait in memory, in order, until there is room again.

        Returns:
            The comparison, if the step was there already.
        """
        if self._starts is None:
            self._starts = self._open()
        earlier = self._earlier(step)
        content: dict[str, Any] = {"step": step, "time": wall_time}
        replay = None
        if earlier is not None:
            replay = _compare(step, earlier, metrics)
            content["replay"] = {key: list(pair) for key, pair in replay.differences.items()}
            metrics = {key: value for key, value in metrics.items() if key not in earlier}
        elif step in self._forgotten:
            self._forgotten.remove(step)
            content["redone"] = True
        content["metrics"] = {key: float(value) for key, value in metrics.items()}
        self._waiting.add(content)
        try:
            self._write_waiting()
        except OSError as error:
            warnings.warn(
                f"{self._file.path} cannot be written ({error.strerror or error}); "
                f"{len(self._waiting)} lines wait in memory",
                stacklevel=2,
            )
        return replay

    def read_from(self, offset: int, max_records: int | None = None) -> tuple[list[Record], int]:
        """Return the records behind ``offset`` and the offset to go on from; 0 is the start."""
        records: list[Record] = []
        for content, _, end in self._file.lines(offset):
            offset = end
            record = _record(content)
            if record is not None and record.metrics:
                records.append(record)
            if len(records) == max_records:
                break
        return records, offset

    def forget(self, step: int) -> None:
        """Let the steps after ``step`` not count any more: they come again, and differently.

        Raises:
            OSError: It cannot be written.
        """
        if self._starts is None:
            self._starts = self._open()
        self._write_waiting()
        self._file.append({FORGOTTEN: step, "time": time.time()})
        self._starts = self._without(self._starts, step)

    def _without(self, starts: dict[int, int], step: int) -> dict[int, int]:
        """Return the lines of the steps up to ``step``, and remember the others as forgotten."""
        self._forgotten |= {known for known in starts if known > step}
        return {known: start for known, start in starts.items() if known <= step}

    def newest_first(self, step: int) -> Iterator[Record]:
        """Yield the record that counts of ``step`` and of those before it, going back."""
        for content in self._file.newest_first():
            record = _record(content)
            if record is not None and "replay" not in content and record.step <= step:
                yield record
                step = record.step - 1

    def is_empty(self) -> bool:
        """Tell whether nothing is known of any step."""
        records, _ = self.read_from(0, 1)
        return not records

    def start(self) -> Record | None:
        """Return what is known from before the first step, if anything: it is written first."""
        records, _ = self.read_from(0, 1)
        return records[0] if records and records[0].step == 0 else None

    def size(self) -> int:
        """Return the bytes on disk: no record lies behind that offset now."""
        return self._file.size()

    def continuation(self) -> Continuation:
        """Count the steps that ran again; what their numbers say is in each `Replay`."""
        replays = [line.content["replay"] for line in self._file.lines() if _is_replay(line)]
        equal = sum(not differences for differences in replays)
        return Continuation(equal, len(replays) - equal)

    def sync(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            OSError: There is no room for all of it.
        """
        self._write_waiting()
        self._file.sync()

    def _open(self) -> dict[int, int]:
        self._file.repair()
        starts: dict[int, int] = {}
        for content, start, _ in self._file.lines():
            if isinstance(last := content.get(FORGOTTEN), int):
                starts = self._without(starts, last)
            elif _record(content) is not None and "replay" not in content:
                starts.setdefault(content["step"], start)
                self._forgotten.discard(content["step"])
        return starts

    def _earlier(self, step: int) -> dict[str, float] | None:
        for content in self._waiting:
            if content["step"] == step and "replay" not in content:
                return content["metrics"]
        start = (self._starts or {}).get(step)
        return None if start is None else self._file.at(start)["metrics"]

    def _write_waiting(self) -> None:
        due = time.monotonic() - self._synced_at >= SYNC_EVERY_S
        self._waiting.write(sync=due)
        if due:
            self._synced_at = time.monotonic()

    def _note_start(self, content: Mapping[str, Any], start: int) -> None:
        if self._starts is not None and "replay" not in content:
            self._starts[content["step"]] = start


def evaluation_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return those metrics that are of an evaluation, by their whole names."""
    return {key: value for key, value in metrics.items() if key.startswith(EVALUATION)}


def _record(content: Mapping[str, Any]) -> Record | None:
    try:
        metrics, is_redone = dict(content["metrics"]), content.get("redone") is True
        float(content["step"])  # one beyond all of float64 is none, as `event_facts` has it
        return Record(int(content["step"]), metrics, float(content["time"]), is_redone)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _is_replay(line: Line) -> bool:
    return isinstance(line.content.get("replay"), dict)


def _compare(step: int, was: Mapping[str, float], now: Mapping[str, float]) -> Replay:
    differences = {
        key: (was[key], float(now[key]))
        for key in was.keys() & now.keys()
        # repr tells every float64 from every other, and says that NaN is NaN
        if not key.startswith(MEASURED) and repr(was[key]) != repr(float(now[key]))
    }
    return Replay(step, differences)
