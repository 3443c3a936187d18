"""``faults.inject``: things that are made to break, each for real and once.

`arm` puts itself around three calls of a training: reading a step's samples, computing a loss, and
beginning to write a checkpoint. Without faults nothing is put anywhere.
"""

import math
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import dmuon
from dmuon_platform.durable_file import sync, write_whole
from dmuon_platform.events import Journal
from dmuon_platform.record import Record
from dmuon_platform.saving import Saving
from dmuon_platform.spec import JobSpec
from dmuon_platform.spec.fault import IN_A_SAVE, FaultKind, InjectedFault
from dmuon_platform.store import CheckpointStore
from dmuon_platform.training import Training

STRIKES_FOLDER = "faults"
"""Inside a run: one file for each time that a fault struck a rank."""

SMALL_FILE_BYTES = 1024
"""What a file may have during `FaultKind.SAVE_ERROR`: heartbeats are smaller, weights are not."""

FIRST_FILE_S = 60.0
"""How long `FaultKind.KILL_DURING_SAVE` waits for a file before it kills without one."""

SIGNALS = {
    FaultKind.KILL: signal.SIGKILL,
    FaultKind.FREEZE: signal.SIGSTOP,
    FaultKind.SIGTERM: signal.SIGTERM,
}
"""What the rank's process is sent."""

POISONS = {FaultKind.NAN: math.nan, FaultKind.INF: math.inf}
"""What the rank's loss is multiplied with."""

CONTROLLER = b"ray::TrainController"


def arm(spec: JobSpec, training: Training, saving: Saving, record: Record) -> None:
    """Let the faults of a job strike this rank. Local; does nothing without any."""
    rank = training.place.rank
    faults = [fault for fault in spec.faults.inject if fault.strikes(rank)]
    if faults:
        _Injection(spec.run_dir, faults, rank, record.attempt).put_around(training, saving)


class Strikes:
    """What has struck already, kept in the run folder: an attempt does not repeat the last one.

    Args:
        run_dir: The folder of the run.
        rank: Whose.
        attempt: Its number.
    """

    def __init__(self, run_dir: Path, rank: int, attempt: int) -> None:
        self._folder = run_dir / STRIKES_FOLDER
        self._journal = Journal(run_dir)
        self._rank = rank
        self._attempt = attempt

    def is_left(self, fault: InjectedFault) -> bool:
        """Tell whether a fault has not struck as often as it should."""
        return not self._path(fault, fault.times).exists()

    def remember(self, fault: InjectedFault, step: int) -> None:
        """Write down that a fault strikes, to be called before it does.

        Raises:
            OSError: It cannot be written, so the fault must not strike: it would again and again.
        """
        number = next(n for n in range(1, fault.times + 1) if not self._path(fault, n).exists())
        self._folder.mkdir(exist_ok=True)
        write_whole(self._path(fault, number), f"attempt {self._attempt}, step {step}\n")
        self._journal.note(
            "fault_injected",
            attempt=self._attempt,
            fault=str(fault.kind),
            step=step,
            on=f"rank {self._rank}",
        )

    def _path(self, fault: InjectedFault, number: int) -> Path:
        return self._folder / f"{fault.label}.{number}-on-{self._rank}"


class _Injection:
    """The faults of one rank, around its training."""

    def __init__(self, run_dir: Path, faults: list[InjectedFault], rank: int, attempt: int) -> None:
        self._run_dir = run_dir
        self._faults = faults
        self._strikes = Strikes(run_dir, rank, attempt)
        self._poison: float | None = None
        """What the next loss is multiplied with."""
        self._deeds: dict[FaultKind, Callable[[InjectedFault], None]] = {
            FaultKind.RAISE: _raise,
            FaultKind.STALL: _block,
            FaultKind.SLOW: _block,
            FaultKind.SPIKE: self._spike,
            FaultKind.CORRUPT_CHECKPOINT: self._corrupt_checkpoint,
            FaultKind.KILL_CONTROLLER: _kill_controller,
        }

    def put_around(self, training: Training, saving: Saving) -> None:
        training.read = self._reading(training.read)
        training.loss_of = self._poisoned(training.loss_of)
        saving.write = self._writing(saving.write)

    def _reading(self, read: Callable[[int], list[Tensor]]) -> Callable[[int], list[Tensor]]:
        def read_with_faults(step: int) -> list[Tensor]:
            for fault in self._faults:
                if self._is_due(fault, step + 1) and fault.kind not in IN_A_SAVE:
                    self._strike(fault, step + 1)
            return read(step)

        return read_with_faults

    def _poisoned(
        self, loss_of: Callable[[nn.Module, Tensor], Tensor]
    ) -> Callable[[nn.Module, Tensor], Tensor]:
        def poisoned_loss_of(model: nn.Module, tokens_BT: Tensor) -> Tensor:
            loss = loss_of(model, tokens_BT)
            poison, self._poison = self._poison, None  # one micro-batch of the step is enough
            return loss if poison is None else loss * poison

        return poisoned_loss_of

    def _writing(self, write: Callable[..., dmuon.SaveHandle]) -> Callable[..., dmuon.SaveHandle]:
        def write_with_faults(path: Path, *args: Any, step: int, **options: Any) -> Any:
            due = [fault for fault in self._faults if self._is_due(fault, step)]
            fault = next((fault for fault in due if fault.kind in IN_A_SAVE), None)
            if fault is None:
                return write(path, *args, step=step, **options)
            self._strikes.remember(fault, step)
            if fault.kind is FaultKind.KILL_DURING_SAVE:
                write(path, *args, step=step, **options)
                _wait_until(lambda: any(path.glob("*")), FIRST_FILE_S)
                _send(signal.SIGKILL)
            with _small_files():
                handle = write(path, *args, step=step, **options)
                _wait_until(lambda: handle.done)
            return handle

        return write_with_faults

    def _is_due(self, fault: InjectedFault, step: int) -> bool:
        """Tell whether a fault strikes in a step counted from 1, or in the save after it."""
        if fault.kind in IN_A_SAVE:
            return step >= fault.step and self._strikes.is_left(fault)
        if fault.kind is FaultKind.CORRUPT_CHECKPOINT:
            there_is_one = step >= fault.step and _newest_checkpoint(self._run_dir) is not None
            return there_is_one and self._strikes.is_left(fault)
        return step == fault.step and self._strikes.is_left(fault)

    def _strike(self, fault: InjectedFault, step: int) -> None:
        self._strikes.remember(fault, step)
        if fault.kind in SIGNALS:
            _send(SIGNALS[fault.kind])
        elif fault.kind in POISONS:
            self._poison = POISONS[fault.kind]
        else:
            self._deeds[fault.kind](fault)

    def _corrupt_checkpoint(self, _fault: InjectedFault) -> None:
        _flip_byte(_newest_checkpoint(self._run_dir))
        _send(signal.SIGKILL)

    def _spike(self, fault: InjectedFault) -> None:
        self._poison = fault.factor


def _raise(fault: InjectedFault) -> None:
    raise RuntimeError(f"injected by faults.inject: {fault.label}")


def _block(fault: InjectedFault) -> None:
    _wait_until(lambda: False, fault.seconds)


def _send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def _wait_until(condition: Callable[[], bool], seconds: float | None = None) -> None:
    """Block until something is so, or for some seconds; None for as long as it takes."""
    end = None if seconds is None else time.monotonic() + seconds
    while not condition() and (end is None or time.monotonic() < end):
        time.sleep(0.005 if end is None else min(0.005, max(0.0, end - time.monotonic())))


@contextmanager
def _small_files() -> Iterator[None]:
    """Let the kernel refuse, with EFBIG, whatever this process adds to larger files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _newest_checkpoint(run_dir: Path) -> Path | None:
    store = CheckpointStore(run_dir, lambda damage: None)
    newest = next(store.newest_first(), None)
    return None if newest is None else newest.path


def _flip_byte(checkpoint: Path | None) -> None:
    assert checkpoint is not None  # else it was not due
    path = max(checkpoint.glob("model-*.safetensors"), key=lambda file: file.stat().st_size)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))
    sync(path)


def _kill_controller(_fault: InjectedFault) -> None:
    """Kill the process in which this cluster's Ray steers the workers.

    Raises:
        RuntimeError: It is not on this machine.
    """
    mine = _log_folder(Path("/proc/self"))
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_controller = CONTROLLER in (process / "cmdline").read_bytes()
            if is_controller and _log_folder(process) == mine:
                os.kill(int(process.name), signal.SIGKILL)
                return
        except OSError:
            continue  # it has just ended, or is somebody else's
    raise RuntimeError(
        "faults.inject: there is no ray::TrainController on the machine of this rank; give "
        "kill_controller a rank on the machine that the job was launched from."
    )


def _log_folder(process: Path) -> Path:
    """Return where a process of Ray writes what it prints: one folder for each cluster."""
    return (process / "fd" / "1").readlink().parent
