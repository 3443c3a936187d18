"""Section ``checkpoint``: how often the run is saved, and what is kept."""

from pydantic import PositiveInt

from dmuon_platform.spec.section import Section


class CheckpointSpec(Section):
    """Always after the last step, and along the way."""

    every: PositiveInt = 100
    """Steps between two checkpoints: at most this much work is lost."""

    keep_last: PositiveInt = 3
    """Checkpoints that stay on disk, newest first."""
