"""Waiting until the cluster has room for the workers of a job."""

import time
from collections.abc import Callable, Sequence

from dmuon_platform import cluster
from dmuon_platform.elastic import NodeRoom, choose_workers, num_leaving, num_places, shortage
from dmuon_platform.errors import PlatformError
from dmuon_platform.events import WAITING, Journal
from dmuon_platform.ray_session import RaySession
from dmuon_platform.spec import JobSpec

SETTLE_S = 5.0
"""What an attempt that has ended had taken is free again after at most so long."""

RETRY_S = 2.0
"""Seconds between two looks."""


def wait_for_room(
    spec: JobSpec,
    session: RaySession,
    pause: Callable[[float], None],
    say: Callable[[str], None],
    settle_s: float = SETTLE_S,
) -> tuple[int, int]:
    """Return with how many workers to go on, and how many used machines are leaving.

    A wait is said once, and written down in the run's journal.

    Args:
        spec: The job.
        session: The connection to Ray.
        pause: Waits for some seconds; may raise to end this.
        say: Prints a line for the person who launched the job.
        settle_s: How long to wait for more room than the fewest workers need.

    Raises:
        PlatformError: There was no room for the fewest within `faults.node_wait_s`; at once when
            a Ray of the job's own could never have it.
        RayLost: There is no cluster any more.
    """
    started, has_said = time.monotonic(), False
    while True:
        nodes = session.room()
        places = num_places(spec, nodes)
        if places < spec.fitting_workers[-1]:
            session.ask_for_room()
        chosen = choose_workers(spec, places)
        waited_s = time.monotonic() - started
        if chosen is not None and (chosen == spec.fitting_workers[-1] or waited_s >= settle_s):
            return chosen, num_leaving(nodes)
        if chosen is None and waited_s > _limit_s(spec, nodes):
            raise PlatformError(
                f"{shortage(spec, nodes)} Waited {waited_s:.0f} s for them (faults.node_wait_s)."
            )
        if chosen is None and waited_s >= settle_s and not has_said:
            has_said = True
            what = shortage(spec, nodes)
            say(f"waiting for room: {what}")
            Journal(spec.run_dir).note(WAITING, what=what)
        pause(RETRY_S / 4 if waited_s < SETTLE_S else RETRY_S)


def _limit_s(spec: JobSpec, nodes: Sequence[NodeRoom]) -> float:
    if cluster.address_of(spec) is not None:
        return spec.faults.node_wait_s
    # Nobody adds machines to a Ray of our own; what is taken there will be free again.
    could_hold = choose_workers(spec, num_places(spec, [node.emptied() for node in nodes]))
    return 0.0 if could_hold is None else spec.faults.node_wait_s
