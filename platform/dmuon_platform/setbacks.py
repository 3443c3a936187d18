"""What a training does about steps that must not count: the journal remembers them for all."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dmuon_platform.batch_order import BatchOrder
from dmuon_platform.metric_names import GRADIENT_NORM, TRAIN_LOSS
from dmuon_platform.record import Record
from dmuon_platform.run_story import DROPPED, ROLLED_BACK
from dmuon_platform.saving import Saving
from dmuon_platform.spec import JobSpec
from dmuon_platform.stability import Stability, Verdict, diverged
from dmuon_platform.training import Training


@dataclass(frozen=True)
class Past:
    """What the journal and the metrics say about the steps before the present one.

    Attributes:
        left_out: First and last batch of each roll-back.
        returns: The step that each roll-back went back to.
        num_dropped: Updates dropped one after another, just before.
        losses: Of the newest applied steps, as many as the spec looks at, oldest first.
    """

    left_out: list[tuple[int, int]]
    returns: list[int]
    num_dropped: int
    losses: list[float]


class Setbacks:
    """Steps whose update is dropped, and roll-backs, of one training. All methods are collective.

    Each roll-back leaves out the batches that were taken since the checkpoint, the offending one
    included: "each sample once an epoch" has exactly these exceptions, which the journal names.

    Args:
        spec: The job.
        training: Which is told the order of its batches.
        saving: Of its checkpoints.
        record: Of what happens.
    """

    def __init__(self, spec: JobSpec, training: Training, saving: Saving, record: Record) -> None:
        self._spec = spec
        self._training = training
        self._saving = saving
        self._record = record
        self._returns: list[int] = []

    def recall(self, step: int) -> None:
        """Take up what earlier attempts, or this one, have left at ``step`` steps done."""
        past = self._training.place.from_first(
            "read what was dropped and left out", lambda: self._past(step)
        )
        self._returns = past.returns
        self._training.order = BatchOrder(past.left_out)
        self._training.stability = Stability(self._spec.faults, past.losses, past.num_dropped)

    def handle(self, step: int, metrics: Mapping[str, float]) -> int:
        """Do what the verdict about a step, counted from 0, asks for; return the steps done then.

        Raises:
            Diverged: There is nothing to go back to, or it was gone back to often enough.
        """
        facts = {"loss": metrics[TRAIN_LOSS], "grad_norm": metrics[GRADIENT_NORM]}
        if self._training.verdict is Verdict.DROP:
            self._record.note(DROPPED, step=step + 1, **facts)
        if self._training.verdict is Verdict.ROLL_BACK:
            return self._roll_back(step, facts)
        return step + 1

    def _roll_back(self, step: int, facts: Mapping[str, float]) -> int:
        limit = self._spec.faults.max_skips
        numbers = facts["loss"], facts["grad_norm"]
        self._saving.settle()
        target = self._saving.restore(self._training)
        if target == 0:
            raise diverged(step, *numbers, " before there was a checkpoint to go back to")
        if self._returns.count(target) >= limit:
            times = f"as {limit} times before (faults.max_skips)"
            raise diverged(step, *numbers, f", after the checkpoint of step {target}, {times}")
        order = self._training.order
        window = {"first_batch": order.batch_of(target), "last_batch": order.batch_of(step)}
        self._training.place.from_first(  # on the disk before anybody goes on by it
            "write down a roll-back",
            lambda: self._record.rolled_back(step + 1, target, {**window, **facts}),
        )
        self.recall(target)
        return target

    def _past(self, step: int) -> Past:
        spike = self._spec.faults.loss_spike
        events = self._record.events(DROPPED, ROLLED_BACK)
        rolled = [event for event in events if event["kind"] == ROLLED_BACK]
        return Past(
            [(event["first_batch"], event["last_batch"]) for event in rolled],
            [event["to_step"] for event in rolled],
            _in_a_row((e["step"] for e in events if e["kind"] == DROPPED), step),
            [] if spike is None else self._record.losses(step, spike.window),
        )


def _in_a_row(dropped: Iterable[int], step: int) -> int:
    """Count the dropped steps that end with ``step``, all counted from 1."""
    known = set(dropped)
    return sum(1 for _ in itertools.takewhile(known.__contains__, range(step, 0, -1)))
