"""``submitted.json``: what was handed to a cluster for a run, until a launch of it begins.

Who submits a job writes it into the folder of a run that is there already, where that is seen from
there. It names the newest launch until then, so no clocks of two machines are compared. A launch
that finds nothing to do removes it, and one that is refused notes why.
"""

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from dmuon_platform.driver_lease import Driver
from dmuon_platform.durable_file import read_object, write_whole
from dmuon_platform.event_facts import clock, number
from dmuon_platform.run_folder import is_run

HANDOVER_FILE = "submitted.json"

ADDRESS_KEY = "dmuon_address"
"""Of the metadata of a submitted job: its job server, as who submitted it has called it."""

ANSWER_S = 3.0
"""A job server that needs longer is taken to be away, for now."""

BELIEVED_S = 600.0
"""How long after a submission a launch of it is still expected where no job server answers."""

_GOING_ON = ("PENDING", "RUNNING")
"""What Ray calls jobs that have not ended."""


@dataclass(frozen=True)
class Handover:
    """A submission, of which no launch has begun.

    Attributes:
        submission: Ray's id of it.
        address: Of the job server that has taken it.
        time: Unix time.
        after: The ``launch`` of the run's ``driver.json`` at that time, None without one.
        problem: Why none will begin, as the end of a sentence; None while one is to come.
    """

    submission: str
    address: str
    time: float | None
    after: str | None
    problem: str | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a launch of it is still to come."""
        return self.problem is None

    def __str__(self) -> str:
        if self.problem is not None:
            return f"{self.submission}, submitted {clock(self.time)}, {self.problem}"
        return (
            f"{clock(self.time)}, and no launch has begun since; how that stands is told by "
            f"`dmuon status {self.submission} --address {self.address}`"
        )


def newest_launch(run_dir: Path) -> str | None:
    """Return which launch has a run, or had it last; None if nobody ever had."""
    driver = Driver.read(run_dir)
    return None if driver is None else driver.launch


def leave_handover(run_dir: Path, submission: str, address: str, after: str | None) -> None:
    """Write it down, unless the run is not seen from here, or may not be written to."""
    if is_run(run_dir):
        _write(run_dir, Handover(submission, address, time.time(), after))


def read_handover(run_dir: Path) -> Handover | None:
    """Return the newest submission, if no launch has begun since."""
    content = read_object(run_dir / HANDOVER_FILE)
    if content is None or content.get("after") != newest_launch(run_dir):
        return None
    submission, address = str(content.get("submission")), str(content.get("address"))
    problem = None if content.get("problem") is None else str(content["problem"])
    return Handover(submission, address, number(content, "time"), content.get("after"), problem)


def settle_handover(run_dir: Path, submission: str | None, refusal: str | None) -> None:
    """Note that the launch of a submission is over, be it that it never had the run.

    Args:
        run_dir: The folder of the run.
        submission: Whose launch it was; None outside one.
        refusal: Why it was refused, if it was.
    """
    handover = read_handover(run_dir)
    if handover is None or handover.submission != submission:
        return
    if refusal is not None:
        _write(run_dir, replace(handover, problem=f"was refused: {' '.join(refusal.split())}"))
        return
    with suppress(OSError):
        (run_dir / HANDOVER_FILE).unlink()


def _write(run_dir: Path, handover: Handover) -> None:
    with suppress(OSError):  # it is a courtesy to who looks at the run
        write_whole(run_dir / HANDOVER_FILE, json.dumps(asdict(handover)) + "\n")


def looked_after(handover: Handover, now: float) -> Handover:
    """Return a submission with what has become of it, as its job server says if that answers.

    Args:
        handover: As it was written down.
        now: Unix time.
    """
    if not handover.is_pending:
        return handover
    server = f"the job server at {handover.address}"
    status = _status(handover)
    if status is None:
        is_believed = handover.time is not None and now - handover.time < BELIEVED_S
        problem = None if is_believed else f"has begun no launch, and {server} does not answer"
    elif status == "":
        problem = f"is gone: {server} does not know of it"
    elif status in _GOING_ON:
        problem = None
    else:
        command = f"dmuon logs {handover.submission} --address {handover.address}"
        problem = f"has ended ({status}), and no launch of it has begun: see `{command}`"
    return replace(handover, problem=problem)


def _status(handover: Handover) -> str | None:
    """Return what Ray calls the submission; nothing for an unknown one, None without an answer."""
    if not handover.address.startswith(("http://", "https://")):
        return None
    url = f"{handover.address.rstrip('/')}/api/jobs/{handover.submission}"
    try:
        with urlopen(url, timeout=ANSWER_S) as answer:
            return str(json.load(answer)["status"])
    except HTTPError as error:
        return "" if error.code == HTTPStatus.NOT_FOUND else None
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return None
