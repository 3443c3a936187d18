"""``submitted.json``: what was handed to a cluster for a run, until a launch of it begins.

Who submits a job writes it into the folder of a run that is there already, where that is seen from
there. It names the newest launch until then, so no clocks of two machines are compared.
"""

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dmuon_platform.driver_lease import Driver
from dmuon_platform.durable_file import read_object, write_whole
from dmuon_platform.event_facts import clock, number
from dmuon_platform.run_folder import is_run

HANDOVER_FILE = "submitted.json"


@dataclass(frozen=True)
class Handover:
    """A submission, of which no launch has begun.

    Attributes:
        submission: Ray's id of it.
        address: Of the job server that has taken it.
        time: Unix time.
        after: The ``launch`` of the run's ``driver.json`` at that time, None without one.
    """

    submission: str
    address: str
    time: float | None
    after: str | None

    def __str__(self) -> str:
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
    content = asdict(Handover(submission, address, time.time(), after))
    if is_run(run_dir):
        with suppress(OSError):  # it is a courtesy to who looks at the run
            write_whole(run_dir / HANDOVER_FILE, json.dumps(content) + "\n")


def read_handover(run_dir: Path) -> Handover | None:
    """Return the newest submission, if no launch has begun since."""
    content = read_object(run_dir / HANDOVER_FILE)
    if content is None or content.get("after") != newest_launch(run_dir):
        return None
    submission, address = str(content.get("submission")), str(content.get("address"))
    return Handover(submission, address, number(content, "time"), content.get("after"))
