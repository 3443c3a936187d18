"""What a finished run has come to, as the launch prints it at the end."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self


@dataclass(frozen=True)
class Summary:
    """The end of a run; kept in its journal, so that a later launch can say it again."""

    name: str
    steps: int
    tokens: int
    restarts: int
    """Attempts after the first, over all launches."""
    bits_per_byte: float
    """Of the held-out text, by the trained model."""
    bigram_bits_per_byte: float
    """Of the same text, by a bigram model of its bytes."""
    checkpoint: str
    weights_sha256: str
    export: str | None = None
    """The Hugging Face folder."""
    registered: str | None = None
    """As MLflow names it: ``models:/name@alias``."""
    version: str | None = None
    tracking_uri: str | None = None
    run_id: str | None = None
    steps_replayed_equal: int = 0
    steps_replayed_different: int = 0

    @property
    def exit_code(self) -> int:
        """What the command ends with."""
        return 0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote; keys of other versions are passed over."""
        known = {each.name for each in fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    def text(self) -> str:
        """Return it as lines for people."""
        rows = [
            ("validation bits per byte", f"{self.bits_per_byte:.3f}"),
            ("  bigram model, same text", f"{self.bigram_bits_per_byte:.3f}"),
            ("checkpoint", self.checkpoint),
            ("weights SHA-256", self.weights_sha256),
        ]
        if self.restarts:
            rows.insert(0, ("restarts", self._restarts()))
        if self.export is not None:
            rows.append(("Hugging Face folder", self.export))
        rows += self._tracking()
        width = max(len(label) for label, _ in rows)
        lines = [f"{label:<{width}}  {value}" for label, value in rows]
        return "\n".join([f"{self.name}: {self.steps} steps, {self.tokens:,} tokens", *lines])

    def _restarts(self) -> str:
        replayed = self.steps_replayed_equal + self.steps_replayed_different
        text = str(self.restarts)
        if replayed:
            text += f"; {self.steps_replayed_equal} of {replayed} repeated steps equal bit for bit"
        return text

    def _tracking(self) -> list[tuple[str, str]]:
        if self.run_id is None:
            return [("MLflow", "not reached; the metrics are in metrics.jsonl of the run folder")]
        rows = [
            ("MLflow run", self.run_id),
            ("  to see it", f"mlflow ui --backend-store-uri {self.tracking_uri}"),
        ]
        if str(self.tracking_uri).startswith("http"):
            rows[1] = ("  to see it", str(self.tracking_uri))
        if self.registered is not None:
            rows.append(("registered model", f"{self.registered} (version {self.version})"))
        return rows
