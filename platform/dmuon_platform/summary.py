"""What a finished run has come to, as the launch prints it at the end."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from dmuon_platform.tracking import Delivery


@dataclass(frozen=True)
class Summary:
    """The end of a run; kept in its journal, so that a later launch can say it again."""

    name: str
    steps: int
    tokens: int
    restarts: int
    """Times that training began again before it was through, over all launches."""
    bits_per_byte: float
    """Of the held-out text, by the trained model."""
    bigram_bits_per_byte: float
    """Of the same text, by a bigram model of its bytes."""
    checkpoint: str
    weights_sha256: str
    start_bits_per_byte: float | None = None
    """Of the same text, by the model that a fine-tuning started from."""
    export: str | None = None
    """The Hugging Face folder."""
    steps_replayed_equal: int = 0
    steps_replayed_different: int = 0
    tracked: tuple[tuple[str, str], ...] = ()
    """Where it can be seen: labels and values for people. Not kept, since it may change."""

    @property
    def exit_code(self) -> int:
        """What the command ends with."""
        return 0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote; keys of other versions are passed over."""
        known = {each.name for each in fields(cls)} - {"tracked"}
        return cls(**{key: value for key, value in data.items() if key in known})

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    def delivered(self, delivery: Delivery, alias: str, report: Path) -> "Summary":
        """Return it with what MLflow knows of the run, and where its report is if there is one."""
        there = [("report", str(report))] if report.exists() else []
        return replace(self, tracked=(*there, *_tracked_lines(delivery, alias)))

    def text(self) -> str:
        """Return it as lines for people."""
        rows = [
            ("validation bits per byte", f"{self.bits_per_byte:.3f}"),
            ("  bigram model, same text", f"{self.bigram_bits_per_byte:.3f}"),
            *self._start(),
            ("checkpoint", self.checkpoint),
            ("weights SHA-256", self.weights_sha256),
        ]
        if self.restarts:
            rows.insert(0, ("restarts", self._restarts()))
        if self.export is not None:
            rows.append(("Hugging Face folder", self.export))
        rows += self.tracked
        width = max(len(label) for label, _ in rows)
        lines = [f"{label:<{width}}  {value}" for label, value in rows]
        return "\n".join([f"{self.name}: {self.steps} steps, {self.tokens:,} tokens", *lines])

    def _start(self) -> Iterator[tuple[str, str]]:
        if self.start_bits_per_byte is not None:
            yield "  before the first step", f"{self.start_bits_per_byte:.3f}"

    def _restarts(self) -> str:
        replayed = self.steps_replayed_equal + self.steps_replayed_different
        text = str(self.restarts)
        if replayed:
            text += f"; {self.steps_replayed_equal} of {replayed} repeated steps equal bit for bit"
        return text


def _tracked_lines(delivery: Delivery, alias: str) -> Iterator[tuple[str, str]]:
    if delivery.run_id is None:
        yield "MLflow", f"not reached: {delivery.problem}. Launch the job again to tell it."
        return
    yield "MLflow run", delivery.run_id
    yield "  to see it", _way_to_see(delivery)
    if delivery.model_name is not None and delivery.model_version is not None:
        place = "/latest" if alias.lower() == "latest" else f"@{alias}"
        name = f"models:/{delivery.model_name}{place}"
        yield "registered model", f"{name} (version {delivery.model_version})"
    if not delivery.is_complete:
        yield "  not all is told", f"{delivery.problem}. Launch the job again to tell the rest."


def _way_to_see(delivery: Delivery) -> str:
    if not delivery.uri.startswith("http"):
        return f"mlflow ui --backend-store-uri {delivery.uri}"
    page = f"{delivery.uri.rstrip('/')}/#/experiments/{delivery.experiment_id}"
    return f"{page}/runs/{delivery.run_id}"
