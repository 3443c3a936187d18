"""``dmuon run`` in processes of its own, again and again until a run is at its end."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from dmuon_platform.child_process import command_of, environment
from dmuon_platform.durable_file import write_whole
from dmuon_platform.errors import GracefulStop
from dmuon_platform.events import Journal
from dmuon_platform.spec import JobSpec
from dmuon_platform.spool import MetricsSpool

MARK = "DMUON_LAUNCHES"
"""Environment variable by which every process that a launch leaves behind is found again."""

LAUNCHED_FILE = "launched.toml"
"""The job as the launches read it, inside the run's folder."""

LOG_FILE = "launches.log"
"""What the launches have printed, inside the run's folder."""

LOOK_S = 0.2
LEFT_S = 60.0
"""How long processes may take to end after the command."""


class Launches:
    """The launches of one run on this machine.

    Args:
        spec: The job.
        driver_kills: Steps done at which the command is killed with SIGKILL, each once.
    """

    def __init__(self, spec: JobSpec, driver_kills: Sequence[int] = ()) -> None:
        self.spec = spec
        self.exit_codes: list[int] = []
        self._job_file = spec.run_dir / LAUNCHED_FILE
        self._kills = sorted(driver_kills)
        self._mark = f"{os.getpid()}-{spec.name}"
        self._most = len(self._kills) + len(spec.faults.inject) + 1

    def run(self) -> int:
        """Launch the job until it ends by itself; return its last exit code.

        It is launched again after it was killed here, and after it stopped on request.
        """
        self.spec.run_dir.mkdir(parents=True, exist_ok=True)
        write_whole(self._job_file, self.spec.to_toml())
        while True:
            code = self._launch()
            self.exit_codes.append(code)
            goes_on = code in (GracefulStop.exit_code, -signal.SIGKILL)
            if not goes_on or len(self.exit_codes) >= self._most:
                return code

    def left_running(self) -> list[str]:
        """Return the processes of these launches that do not end, after some time for it."""
        deadline = time.monotonic() + LEFT_S
        while (left := list(self._processes())) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return left

    def _launch(self) -> int:
        with (self.spec.run_dir / LOG_FILE).open("ab") as log:
            process = subprocess.Popen(
                command_of("dmuon_platform.cli", "run", str(self._job_file)),
                env=environment(**{MARK: self._mark}),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._watch(process)
        except BaseException:  # such as Ctrl-C, which the command has not got
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
        return process.wait()

    def _watch(self, process: "subprocess.Popen[bytes]") -> None:
        spool = MetricsSpool(self.spec.run_dir)
        offset = spool.size()
        while process.poll() is None:
            time.sleep(LOOK_S)
            records, offset = spool.read_from(offset)
            if self._kills and any(record.step >= self._kills[0] for record in records):
                step = self._kills.pop(0)
                facts = {"fault": "kill_driver", "step": step, "on": "the driver"}
                Journal(self.spec.run_dir).append("fault_injected", **facts)
                process.kill()

    def _processes(self) -> Iterator[str]:
        mark = f"{MARK}={self._mark}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                    yield f"{process.name} {command.decode(errors='replace')[:80]}"
            except OSError:
                continue  # it has just ended, or is somebody else's
