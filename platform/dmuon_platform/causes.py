"""Why an attempt ended: the thing that happened first, found in what Ray raised."""

import errno
import re
from dataclasses import dataclass, replace
from typing import Any

from dmuon_platform.errors import (
    Diverged,
    FatalError,
    GracefulStop,
    PlatformError,
    SpecError,
)
from dmuon_platform.lease import StaleAttempt

FINAL = (Diverged, FatalError, GracefulStop, SpecError, StaleAttempt)
"""Errors that another attempt would only repeat."""

TIMEOUT = re.compile(r"timed? ?out", re.I)

COLLATERAL = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|timed? ?out|broken pipe|Rank 0 failed", re.I
)
"""What the other ranks say when one of them is gone or stuck."""

LOST = frozenset(
    {
        "RayActorError",  # also ActorDiedError: a process is gone
        "NodeDiedError",
        "PreemptionError",
        "RaySystemError",
        "WorkerHealthCheckFailedError",
        "WorkerGroupStartupFailedError",  # what was free a moment ago is free no more
        "WorkerGroupStartupTimeoutError",
    }
)
UNANSWERED = "WorkerHealthCheckTimeoutError"
"""A worker process is there and does not answer Ray."""

GUESSES = re.compile(r"\s*Some common causes include:.*")
"""To the end of its line: what Ray tells of every process that is gone, whatever ended it."""

INNER = re.compile(r"^\t(class_name|actor_id|namespace): \S+\n", re.M)
"""Lines about a process that is gone which say something within Ray alone."""

NO_MEMORY = re.compile(r"out[ _]of[ _]memory|low on memory", re.I)
"""In what is left then, only of a process that Ray itself has killed for it."""

PLACE = re.compile(r"^\s*pid: (?P<pid>\d+)$.*?^\s*ip: (?P<ip>\S+)$", re.M | re.S)

FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT})
STORAGE_AWAY = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EROFS})
"""Numbers of an `OSError` that may be gone at the next try."""


@dataclass(frozen=True)
class Cause:
    """Why one attempt ended: plain text, and the error itself when it must not be retried."""

    summary: str
    details: str
    is_loss: bool = False
    """Something is lost or stuck, rather than an error raised by the code."""
    is_hang: bool = False
    """Somebody waited in vain; the heartbeats tell for whom."""
    may_repeat: bool = False
    """It may be gone at another try, although it happens at the same step."""
    leaves_workers: bool = False
    """Nobody has ended the workers; they end when we leave the cluster."""
    final: PlatformError | None = None

    def explained(self, stall: str) -> "Cause":
        """Return this cause with who was stuck on top."""
        return replace(self, summary=stall, details=f"{self.summary}\n{self.details}", is_loss=True)


def cause_of(error: BaseException) -> Cause:
    """Find in what Ray raised the thing that happened first."""
    workers: dict[int, Exception] = getattr(error, "worker_failures", {})
    if not workers:
        return _cause_of_controller(getattr(error, "controller_failure", error), error)
    rank = min(workers, key=lambda rank: (_rank_of_blame(workers[rank]), rank))
    guilty = workers[rank]
    if _is_death(guilty):
        return _cause_of_death(rank, guilty)
    is_collateral = bool(COLLATERAL.search(str(guilty)))  # then nobody has said anything else
    lost = " misses another (a process, a machine or the network is gone)" if is_collateral else ""
    return Cause(
        f"Rank {rank}{lost}: {_one_line(guilty)}",
        _plain(error),
        is_loss=is_collateral or _is_storage(guilty),
        is_hang=is_collateral and bool(TIMEOUT.search(str(guilty))),
        final=guilty if isinstance(guilty, FINAL) else None,
    )


def _cause_of_death(rank: int, guilty: Exception) -> Cause:
    why = _plain(getattr(guilty, "health_check_failure", guilty))
    place = PLACE.search(why)
    at = "" if place is None else f" (process {place['pid']} on {place['ip']})"
    how = "killed, out of memory, or its machine"  # Ray does not know which, nor by which signal
    if NO_MEMORY.search(why):
        how = "killed by Ray, since its machine was short of memory"
    text = f"The worker process of rank {rank} died{at}: {how}."
    return Cause(text, why, is_loss=True, is_hang=_is(guilty, {UNANSWERED}))


def _cause_of_controller(inner: BaseException, error: BaseException) -> Cause:
    is_death = _is(inner, {"RayActorError"})
    died = "The process that steers the workers (Ray's controller) died."
    return Cause(
        died if is_death else _one_line(inner),
        _plain(error),
        is_loss=_is(inner, LOST) or _is_storage(inner),
        leaves_workers=is_death,
        final=inner if isinstance(inner, FINAL) else None,
    )


def _rank_of_blame(error: Exception) -> int:
    if isinstance(error, FINAL):
        return 0
    if _is_death(error):
        return 1
    return 3 if COLLATERAL.search(str(error)) else 2


def _is_death(error: BaseException) -> bool:
    return _is(error, LOST | {UNANSWERED})


def _is_storage(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in FULL_DISK | STORAGE_AWAY


def _is(error: Any, names: set[str] | frozenset[str]) -> bool:
    return bool({base.__name__ for base in type(error).__mro__} & names)


def _plain(error: BaseException) -> str:
    return INNER.sub("", GUESSES.sub("", str(error)))


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")
