"""One thing that is wrong with a job, in words for its author."""

from dataclasses import dataclass

from dmuon_platform.errors import SpecError


@dataclass(frozen=True)
class Problem:
    """A broken rule: where, which, and what to write instead.

    Attributes:
        key: ``section.key`` as in the job file.
        rule: What must hold, with the value that does not.
        way_out: What to change.
        reads: Other keys the rule looks at; it says nothing while one of them is wrong itself.
    """

    key: str
    rule: str
    way_out: str
    reads: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.key}: {self.rule}; {self.way_out}"

    def as_error(self) -> SpecError:
        """Return it as an exception."""
        return SpecError(str(self))
