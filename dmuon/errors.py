"""Every error DMuon raises on purpose.

::

    DMuonError
    ├── SetupError (ValueError)        wrong arguments or order of calls, a mesh that does not fit
    ├── OwnershipError (RuntimeError)  weights or gradients asked for in a way owners cannot serve
    ├── NonFiniteGradientError (RuntimeError)  gradients with NaN or infinity, when asked for
    ├── CollectiveError (RuntimeError) ranks that disagree, or one that no longer takes part
    ├── StateDictError (ValueError)    names or shapes of a state dict that do not fit the model
    └── CheckpointError (RuntimeError) a checkpoint that cannot be written, read or used
        └── DamagedCheckpointError     a folder or file that is not whole, or not what was written
"""

from pathlib import Path


class DMuonError(Exception):
    """Base of all errors of this package; each names the thing, the rule and the way out."""


class SetupError(DMuonError, ValueError):
    """The model, the mesh or the order of set-up calls does not fit; nothing was changed."""


class OwnershipError(DMuonError, RuntimeError):
    """A call that plain PyTorch would answer wrongly for parameters that live on owners."""


class NonFiniteGradientError(DMuonError, RuntimeError):
    """Gradients hold NaN or infinity; raised on every rank.

    Attributes:
        names: of the parameters, in the order of the model.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        super().__init__(
            f"gradients are not finite in {len(names)} parameters: {shown or 'their sum overflows'}"
            "; skip the step with optimizer.zero_grad(), lower the rate, or look at the data"
        )

    def __reduce__(self) -> tuple[type["NonFiniteGradientError"], tuple[list[str]]]:
        return type(self), (self.names,)


class CollectiveError(DMuonError, RuntimeError):
    """Ranks disagree about the order of calls, or one has failed or is stuck; start anew."""


class StateDictError(DMuonError, ValueError):
    """A state dict does not fit; raised on every rank before anything was changed.

    Attributes:
        problems: one line for each name that is missing, unexpected or misshapen.
    """

    def __init__(self, what: str, problems: list[str]) -> None:
        self.what = what
        self.problems = problems
        shown = "\n  ".join(problems[:20])
        rest = f"\n  ... and {len(problems) - 20} more" if len(problems) > 20 else ""
        super().__init__(
            f"{what} does not fit this model, nothing was loaded; give one of such a model:"
            f"\n  {shown}{rest}"
        )

    def __reduce__(self) -> tuple[type["StateDictError"], tuple[str, list[str]]]:
        return type(self), (self.what, self.problems)


class CheckpointError(DMuonError, RuntimeError):
    """A checkpoint that cannot be written, read or used.

    Attributes:
        path: of the folder, or of the file where there is no folder.
        reason: what is wrong with it.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class DamagedCheckpointError(CheckpointError):
    """A folder or file that is not whole, or no longer what was written."""

    def __str__(self) -> str:
        what = f"{self.path} is not a whole checkpoint: {self.reason}"
        return f"{what}; use another one, or copy it again"
