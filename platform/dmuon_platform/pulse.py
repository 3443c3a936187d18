"""One rank's pulse: tells how far it is, ends it when it is stuck, and hears requests to stop.

A thread beside the training writes the heartbeat. When the training has not come forward for too
long, the thread leaves the Python stacks of all threads and ends the process: Ray then notices a
dead worker, while for it a process that only waits is a healthy one. What counts as too long is
`Pulse.limit_s`.
"""

import faulthandler
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Self

from dmuon_platform.heartbeat import STACKS_FOLDER, Heartbeat, Heartbeats, Phase
from dmuon_platform.place import Place
from dmuon_platform.spec.faults import FaultsSpec
from dmuon_platform.stop_request import After, StopFile, StopRequest

LOOK_S = 1.0
"""Seconds between two looks at the training, and at ``stop.json``."""

BEAT_S = 5.0
"""Seconds between two writes of a heartbeat, when nothing else is due."""

LAST_BEAT_S = 2.0
"""From the stacks to the end of the process: the other ranks find out at about the same time, and
Ray kills all of them once the first has ended."""

STUCK_CODE = 71
"""Exit code of a worker process that ended itself because it was stuck."""

SLOW_PHASES = (Phase.START, Phase.SAVE, Phase.END)
"""Those that may take long every time; the others only at first, when they compile."""

_terminated = threading.Event()
"""Whether this worker process got SIGTERM, which is for whatever training runs in it."""


class Pulse:
    """A context manager around one rank's training.

    Attributes:
        step: Optimizer steps done.

    Args:
        run_dir: The folder of the run.
        faults: How long is too long.
        place: Which rank this is.
        attempt: Its number.
        launch: Whose requests to stop are meant for this attempt.
    """

    def __init__(
        self, run_dir: Path, faults: FaultsSpec, place: Place, attempt: int, launch: str
    ) -> None:
        self._faults = faults
        self._place = place
        self._launch = launch
        self._beats = Heartbeats(run_dir)
        self._stops = StopFile(run_dir)
        self._stacks = run_dir / STACKS_FOLDER / f"attempt-{attempt}-rank-{place.rank:05d}.txt"
        now = time.time()
        self._beat = Heartbeat(
            attempt, place.rank, socket.gethostname(), os.getpid(), 0, Phase.START, 0, now, now
        )
        self._progress = time.monotonic()
        self._warm: set[Phase] = set()
        self._request: StopRequest | None = None
        self._has_stacks = False
        self._is_over = threading.Event()
        self._beat_s = beat_period_s(faults)
        self._thread = threading.Thread(target=self._watch, name="pulse", daemon=True)

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def at(self, phase: Phase, step: int | None = None) -> None:
        """Say what this rank is at now. That it was said is progress.

        Args:
            phase: The same as before while it comes forward in it.
            step: Optimizer steps done, when that has changed.
        """
        beat = self._beat
        if phase != beat.phase:
            self._warm.add(beat.phase)
        self._beat = replace(
            beat,
            phase=phase,
            step=beat.step if step is None else step,
            count=beat.count + 1,
            progress=time.time(),
        )
        self._progress = time.monotonic()
        self._has_stacks = False

    @property
    def limit_s(self) -> float:
        """Seconds without progress after which this rank is stuck, in its present phase.

        The first time in a phase is measured like the slow ones: it may compile.
        """
        phase = self._beat.phase
        is_slow = phase in SLOW_PHASES or phase not in self._warm
        return self._faults.slow_stall_s if is_slow else self._faults.stall_s

    @property
    def should_stop(self) -> bool:
        """Whether this rank knows of a request to stop; others may know more. Local."""
        return self._request is not None or _terminated.is_set()

    def agree(self) -> StopRequest:
        """Return the request all ranks stop for: to end before to restart. Collective.

        To be called on all ranks after one of them said `should_stop`.
        """
        mine = self._request
        if _terminated.is_set() and (mine is None or mine.after != After.END):
            mine = StopRequest.now(self._launch, f"rank {self._place.rank} got SIGTERM")
        requests = [request for request in self._place.gather(mine) if request is not None]
        return next((each for each in requests if each.after == After.END), requests[0])

    def _watch(self) -> None:
        beaten = time.monotonic()
        while not self._is_over.wait(min(LOOK_S, self._beat_s)):
            if self._place.is_first:  # the flag rides to the others on the next step
                self._request = self._stops.read(self._launch) or self._request
            idle_s = time.monotonic() - self._progress
            if idle_s > min(self.limit_s, 0.75 * self._faults.timeout_s) and not self._has_stacks:
                self._has_stacks = True  # before the others' collectives end this process
                self._leave_stacks(idle_s)
            if idle_s > self.limit_s:
                self._end()
            if time.monotonic() - beaten > self._beat_s:
                beaten = time.monotonic()
                self._write()

    def _write(self, *, is_stuck: bool = False) -> None:
        beat = replace(self._beat, time=time.time(), is_stuck=is_stuck)
        with suppress(OSError):  # a full disk is no reason to stop
            self._beats.write(beat)

    def _leave_stacks(self, idle_s: float) -> None:
        beat = self._beat
        title = (
            f"Rank {beat.rank} (process {beat.pid} on {beat.host}) did not come forward for "
            f"{idle_s:.0f} s: step {beat.step + 1}, phase {beat.phase}.\n\n"
        )
        with suppress(OSError):
            self._stacks.parent.mkdir(parents=True, exist_ok=True)
            with self._stacks.open("w", encoding="utf-8") as file:
                file.write(title)
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)

    def _end(self) -> None:
        self._write(is_stuck=True)
        time.sleep(LAST_BEAT_S)
        os._exit(STUCK_CODE)  # a thread that hangs keeps every other way of ending from working


def beat_period_s(faults: FaultsSpec) -> float:
    """Return the seconds between two heartbeats of a rank."""
    return min(BEAT_S, faults.stall_s / 4)


def catch_sigterm() -> None:
    """Let SIGTERM stop the training of this worker after its step. For the main thread.

    A second one ends the process, as the first does without this.
    """
    _terminated.clear()
    signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(_signal: int, _frame: FrameType | None) -> None:
    if _terminated.is_set():
        raise SystemExit(1)
    _terminated.set()
