"""What can go wrong, as types; each carries the exit code of the command.

    PlatformError      1   gave up, or anything below
    ├── SpecError     78   the job file, or what it asks for, is wrong: nothing was started
    ├── GracefulStop  75   stopped on request after a checkpoint: submit again to go on
    ├── ClusterLost   75   the cluster is gone: submit again
    ├── AlreadyRunning 3   the run is being run, by another launch
    ├── NoCluster     69   no cluster, or no job server, is at the address or lets us in
    ├── Diverged      86   the loss or a gradient is no longer a number
    ├── FatalError    70   the same failure again: another attempt would not help
    ├── NoCheckpointError  2   something else is named where a checkpoint is wanted
    └── CopyError      2   a checkpoint that cannot be copied as asked
        └── DamagedSourceError  1   because it is not whole

A message names the thing, the rule and the way out. Only the message is carried, so all of them
survive the pickling by which Ray sends errors between processes.
"""

from typing import ClassVar

RUNNING = 3
"""Exit code of whoever asks for a run, or for another launch of it, while it goes on."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


class PlatformError(Exception):
    """The platform cannot go on. The message says what, why, and what to do about it."""

    exit_code: ClassVar[int] = 1


class SpecError(PlatformError):
    """The job cannot be run as it is written."""

    exit_code: ClassVar[int] = 78


class GracefulStop(PlatformError):  # noqa: N818 - a stop on request is not an error
    """The job was asked to stop, saved a checkpoint and ended; started again, it goes on.

    Args:
        fact: What happened, in sentences; the way out is said for it.
    """

    exit_code: ClassVar[int] = 75

    def __init__(self, fact: str) -> None:
        super().__init__(fact)
        self.fact = fact

    def __str__(self) -> str:
        return f"{self.fact} Run it again to go on."


class ClusterLost(PlatformError):  # noqa: N818 - named for what happened to the run
    """The cluster went away and did not come back in time; on another one the run goes on."""

    exit_code: ClassVar[int] = 75


class Diverged(PlatformError):  # noqa: N818 - named for what happened to the run
    """The loss or a gradient became infinite or not a number."""

    exit_code: ClassVar[int] = 86


class FatalError(PlatformError):
    """A failure that another attempt would only repeat."""

    exit_code: ClassVar[int] = 70


class NoCheckpointError(PlatformError):
    """What is named holds checkpoints, and is none."""

    exit_code: ClassVar[int] = 2


class CopyError(PlatformError):
    """A checkpoint cannot be copied as asked; what is at the target is none."""

    exit_code: ClassVar[int] = 2


class DamagedSourceError(CopyError):
    """What should be copied is not what was written."""

    exit_code: ClassVar[int] = 1


class AlreadyRunning(PlatformError):  # noqa: N818 - names what is the case
    """Another launch of the same run is alive."""

    exit_code: ClassVar[int] = RUNNING


class NoCluster(PlatformError):  # noqa: N818 - names what is the case
    """Nothing answers at the address of a cluster or its job server, or it does not let us in."""

    exit_code: ClassVar[int] = 69  # EX_UNAVAILABLE


SUBMIT_AGAIN = frozenset({GracefulStop.exit_code, ClusterLost.exit_code, INTERRUPTED})
"""Exit codes of runs that have not failed: launched again, they go on."""


def problem_of(error: BaseException) -> str:
    """Return what happened, for those who read of it later."""
    if isinstance(error, KeyboardInterrupt):
        return "ended at once by Ctrl-C, while it was stopping"
    if isinstance(error, GracefulStop):
        return error.fact
    return str(error) or type(error).__name__


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a command that ends with this error."""
    if isinstance(error, PlatformError):
        return error.exit_code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FatalError.exit_code
