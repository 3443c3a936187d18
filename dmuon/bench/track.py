"""Where contenders take turns: the same steps on the same data, with the same clocks."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dmuon.bench.clock import HostClock, Laps, clock_for
from dmuon.bench.contenders import Contender
from dmuon.bench.settings import Settings
from dmuon.bench.text import load_text, rows_of
from dmuon.bench.traffic import Payload, sent_bytes


@dataclass(frozen=True)
class Turn:
    """What one contender did in one turn, on one rank.

    Attributes:
        laps: of each step; waiting for other ranks included.
        cpu: of each step the CPU seconds of this process.
        sent: bytes that the kernel sent in all steps together; None where nobody counts.
    """

    laps: list[Laps]
    cpu: list[Laps]
    sent: int | None


class Track:
    """Data and clocks of one rank."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self._text = load_text(settings.sequence + 1)
        self._clock = clock_for(device)
        self._cpu_clock = HostClock(time.process_time)
        self._counts_sent = device.type == "cpu"  # what NCCL sends goes by other ways too

    def turn(self, contender: Contender, num_steps: int) -> Turn:
        """Whole training steps. Collective over all ranks."""
        before = sent_bytes() if self._counts_sent else None
        steps = [self._step(contender) for _ in range(num_steps)]
        after = sent_bytes() if self._counts_sent else None
        sent = None if before is None or after is None else after - before
        return Turn([laps for laps, _ in steps], [cpu for _, cpu in steps], sent)

    def payload(self, contender: Contender) -> dict[str, int]:
        """Of one step, what this rank handed to collectives. Collective over all ranks."""
        # torch.compile, which some use, refuses to run where somebody looks on
        with torch.compiler.set_stance("force_eager"), Payload() as payload:
            self._step(contender)
        return dict(payload.bytes)

    def _step(self, contender: Contender) -> tuple[Laps, Laps]:
        """One whole training step, between barriers."""
        rows = self._rows(contender)
        self._barrier()
        self._mark()
        loss = contender.model(rows)
        self._mark()
        loss.backward()
        self._mark()
        contender.optimizer.step()
        contender.optimizer.zero_grad()
        self._mark()
        laps, cpu = self._clock.laps(), self._cpu_clock.laps()
        self._barrier()
        contender.losses.append(loss.detach())
        return laps, cpu

    def _mark(self) -> None:
        self._clock.mark()
        self._cpu_clock.mark()

    def _rows(self, contender: Contender) -> torch.Tensor:
        """This rank's share of the next step's rows: the same for all contenders."""
        num_ranks = dist.get_world_size()
        step = self._settings.seed + len(contender.losses)
        batch = self._settings.batch_over(num_ranks)
        rows = rows_of(self._text, step, batch, self._settings.sequence)
        return rows.chunk(num_ranks)[dist.get_rank()].to(self._device)

    def _barrier(self) -> None:
        dist.barrier(device_ids=None if self._device.type == "cpu" else [self._device.index])
