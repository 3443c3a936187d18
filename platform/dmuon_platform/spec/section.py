"""What all sections of a job have in common."""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from dmuon_platform.spec.problem import Problem


class Section(BaseModel):
    """A frozen part of a job: unknown keys are refused, and nothing is converted on the way in."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong with this section as a whole, its fields being right."""
        yield from ()
