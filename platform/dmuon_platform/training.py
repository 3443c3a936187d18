"""One step of training and one evaluation: what is computed, and what is measured about it."""

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dmuon
from dmuon_platform.batch_order import BatchOrder
from dmuon_platform.data import Dataset
from dmuon_platform.evaluation import bigram_bits_per_byte, bits_per_byte
from dmuon_platform.heartbeat import Phase
from dmuon_platform.metric_names import (
    BIGRAM_BITS_PER_BYTE,
    BITS_PER_BYTE,
    EVALUATION_LOSS,
    GRADIENT_NORM,
    LEARNING_RATE,
    TIME,
    TOKENS,
    TOKENS_PER_S,
    TRAIN_LOSS,
)
from dmuon_platform.model import next_token_loss
from dmuon_platform.place import Place
from dmuon_platform.schedule import lr_multiplier
from dmuon_platform.spec import JobSpec
from dmuon_platform.stability import Stability, Verdict
from dmuon_platform.update_table import UpdateTable

# B: sequences of one micro-batch; T: tokens of a sequence.


class Training:
    """The model, its optimizer and its data, advanced step by step.

    A step is a function of the weights and of (seed, step, place) alone: learning rate, samples
    and random numbers are computed, not carried along, so a resumed run has nothing to restore
    but the weights and the optimizer state.

    Attributes:
        all_ready: Whether every rank was ``ready`` in the last step; equal on all ranks.
        any_stop: Whether some rank wanted to ``stop`` in the last step; equal on all ranks.
        verdict: What has become of the last step's update; equal on all ranks.
        stability: That says so.
        updates: What the last step's updates were like, where that was looked at; on all ranks.
        order: Of the batches.
        read: Returns this rank's micro-batches of a step.
        loss_of: Returns the mean loss of a model on a micro-batch.

    Args:
        spec: The job.
        place: This rank's.
        model: Spread over the mesh.
        optimizer: Of it.
        dataset: Prepared.
        on_progress: Told of every phase of a step, and in it of every micro-batch.
    """

    def __init__(
        self,
        spec: JobSpec,
        place: Place,
        model: nn.Module,
        optimizer: "dmuon.Muon",
        dataset: Dataset,
        on_progress: Callable[[Phase], None] = lambda phase: None,
    ) -> None:
        self.spec = spec
        self.place = place
        self.model = model
        self.optimizer = optimizer
        self.dataset = dataset
        self.all_ready = False
        self.any_stop = False
        self.verdict = Verdict.APPLY
        self.stability = Stability(spec.faults)
        self.updates: UpdateTable | None = None
        self.order = BatchOrder()
        self.read: Callable[[int], list[Tensor]] = self._tokens
        self.loss_of: Callable[[nn.Module, Tensor], Tensor] = next_token_loss
        self._on_progress = on_progress
        self.num_micro_steps = spec.accumulation(place.world_size)
        self._base_lrs = [group["lr"] for group in optimizer.param_groups]

    def step(self, step: int, *, ready: bool = False, stop: bool = False) -> dict[str, float]:
        """Do step number ``step``, counted from 0, and return its metrics. Collective.

        Args:
            step: Its number.
            ready: Told to the other ranks with the loss, for `all_ready`.
            stop: The same for `any_stop`.

        Raises:
            Diverged: The loss or the gradient is not finite and the run should end for that; on
                all ranks and before any weight has changed.
        """
        clock = _Clock(self.place.device)
        self._set_learning_rate(step)
        torch.manual_seed(_fold(self.spec.train.seed, step, self.place.rank))
        with clock.span("data"):
            self._on_progress(Phase.DATA)
            tokens = self.read(step)
        with clock.span("forward_backward"):
            loss = self._forward_backward(tokens, ready, stop)
        with clock.span("optimizer"):
            self._on_progress(Phase.OPTIMIZER)
            norm = self._clip()
            self.verdict = self.stability.judge(step, loss, norm)
            self.updates = None
            if self.verdict is Verdict.APPLY:
                self._update(step)
            self.optimizer.zero_grad(set_to_none=True)
        num_tokens = self.spec.train.global_batch_size * self.spec.data.sequence_length
        return {
            TRAIN_LOSS: loss,
            GRADIENT_NORM: norm,
            TOKENS: float(num_tokens * (step + 1)),
            **self._learning_rates(),
            **({} if self.updates is None else self.updates.summary()),
            TOKENS_PER_S: num_tokens / clock.total_s(),
            **clock.spans,
        }

    def evaluate(self) -> dict[str, float]:
        """Return the loss on the held-out sequences, the same ones every time. Collective."""
        rows = range(min(self.spec.evaluation.sequences, self.dataset.num_validation_sequences))
        mine = [*rows][self.place.rank :: self.place.world_size]
        size = self.spec.train.micro_batch_size
        total, count = 0.0, 0
        self.model.eval()
        with torch.no_grad():
            # All ranks do as many forwards: each one is a collective.
            for index in range(math.ceil(math.ceil(len(rows) / self.place.world_size) / size)):
                self._on_progress(Phase.EVALUATE)
                chosen = mine[index * size : (index + 1) * size]
                loss = next_token_loss(self.model, self._held_out(chosen or [0]))
                total += loss.item() * len(chosen)
                count += len(chosen)
        self.model.train()
        sums = self._sum_over_ranks(total, float(count))
        mean = sums[0] / sums[1]
        return {
            EVALUATION_LOSS: mean,
            BITS_PER_BYTE: bits_per_byte(mean, self.dataset.info),
            BIGRAM_BITS_PER_BYTE: self._bigram_bits_per_byte,  # a line to compare with
        }

    @cached_property
    def _bigram_bits_per_byte(self) -> float:
        return bigram_bits_per_byte(self.dataset)

    def _forward_backward(self, tokens: list[Tensor], ready: bool, stop: bool) -> float:
        """Add up the mean gradient of the global batch; return its mean loss over all ranks."""
        total = 0.0
        for index, tokens_BT in enumerate(tokens):
            self._on_progress(Phase.COMPUTE)
            is_last = index == self.num_micro_steps - 1
            with nullcontext() if is_last else dmuon.no_sync(self.model):
                loss = self.loss_of(self.model, tokens_BT)
                (loss / self.num_micro_steps).backward()
            total += loss.item()
        total, num_ready, num_stops = self._sum_over_ranks(total, float(ready), float(stop))
        self.all_ready = num_ready == self.place.world_size
        self.any_stop = num_stops > 0
        return total / (self.num_micro_steps * self.place.world_size)

    def _sum_over_ranks(self, *values: float) -> list[float]:
        # Gathered and added in the order of ranks: the same bits whenever the run is repeated.
        mine = torch.tensor(values, dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(self.place.world_size)]
        dist.all_gather(parts, mine, group=self.place.control)
        return [math.fsum(column) for column in zip(*(p.tolist() for p in parts), strict=True)]

    def _clip(self) -> float:
        limit = self.spec.train.clip_grad_norm
        return dmuon.clip_grad_norm_(self.optimizer, math.inf if limit is None else limit).item()

    def _update(self, step: int) -> None:
        """Change the weights, and look at how where that is due. Collective."""
        every = self.spec.tracking.update_statistics_every
        # counted from 1; a function of the step alone, so all ranks look at the same ones
        is_due = every is not None and (
            step == 0 or (step + 1) % every == 0 or step + 1 == self.spec.num_steps
        )
        if not is_due:
            self.optimizer.step()
            return
        with dmuon.watch_updates(self.optimizer) as mine:
            self.optimizer.step()
        group = next(each for each in self.optimizer.param_groups if each["algorithm"] == "muon")
        band = dmuon.singular_value_band(group["ns_coefficients"], group["ns_steps"])
        self.updates = UpdateTable.of(self.place.gather(mine), band)

    def _set_learning_rate(self, step: int) -> None:
        scale = lr_multiplier(self.spec.schedule, self.spec.num_steps, step)
        for group, base in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base * scale

    def _learning_rates(self) -> dict[str, float]:
        groups = self.optimizer.param_groups
        return {f"{LEARNING_RATE}{group['algorithm']}": float(group["lr"]) for group in groups}

    def _tokens(self, step: int) -> list[Tensor]:
        """Return this rank's micro-batches of ``step``: its rows follow from its place alone."""
        size = self.spec.train.micro_batch_size
        per_rank = size * self.num_micro_steps
        first = self.place.rank * per_rank
        rows = self.dataset.batch(
            self.order.batch_of(step),
            slice(first, first + per_rank),
            self.spec.train.global_batch_size,
            self.spec.train.seed,
        )
        return [part.to(self.place.device) for part in rows.split(size)]

    def _held_out(self, rows: list[int]) -> Tensor:
        parts = [self.dataset.validation_batch(row, 1) for row in rows]
        return torch.cat(parts).to(self.place.device)


class _Clock:
    """Seconds by span of one step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = time.perf_counter()
        self.spans: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with torch.profiler.record_function(f"dmuon_platform.{name}"):
            yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.spans[f"{TIME}{name}_s"] = time.perf_counter() - start

    def total_s(self) -> float:
        return time.perf_counter() - self._start


def _fold(seed: int, step: int, rank: int) -> int:
    """Return one seed for (seed, step, rank), different for each of them."""
    text = f"{seed} {step} {rank}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
