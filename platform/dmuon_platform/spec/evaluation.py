"""Section ``evaluation``: how often the held-out text is scored."""

from pydantic import PositiveInt

from dmuon_platform.spec.section import Section


class EvaluationSpec(Section):
    """Always after the last step, and along the way."""

    every: PositiveInt | None = 100
    """Steps between two evaluations; none for only after the last."""

    sequences: PositiveInt = 64
    """Held-out sequences that are scored, always the same ones."""
