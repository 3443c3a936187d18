"""Section ``evaluation``: how often the held-out text is scored."""

from pydantic import PositiveInt

from dmuon_platform.spec.section import Section


class EvaluationSpec(Section):
    """After the last step, along the way, and before the first step with ``model.path``."""

    every: PositiveInt | None = 100
    """Steps between two evaluations; none for none along the way."""

    sequences: PositiveInt = 64
    """Held-out sequences that are scored, always the same ones."""
