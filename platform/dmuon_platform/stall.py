"""Which rank the others waited for, told from the last heartbeats of an attempt."""

from collections.abc import Sequence

from dmuon_platform.heartbeat import STACKS_FOLDER, Heartbeat

FROZEN_BEATS = 2.5
"""A rank so many beats behind the newest one is frozen: its threads do not run either."""


def stuck_ranks(beats: Sequence[Heartbeat], beat_s: float) -> list[Heartbeat]:
    """Return those that hold the others up: the frozen ones, or else those furthest behind.

    Args:
        beats: The last one of each rank of an attempt.
        beat_s: Seconds between two beats of a rank.
    """
    if not beats:
        return []
    newest = max(beat.time for beat in beats)
    frozen = [beat for beat in beats if newest - beat.time > FROZEN_BEATS * beat_s]
    if frozen:
        return frozen
    fewest = min(beat.count for beat in beats)
    return [beat for beat in beats if beat.count == fewest]


def describe_stall(beats: Sequence[Heartbeat], beat_s: float) -> str:
    """Say in one line who was stuck, where and since when; empty without any heartbeat."""
    stuck = stuck_ranks(beats, beat_s)
    if not stuck:
        return ""
    now = max(beat.time for beat in beats)
    each = "; ".join(
        f"rank {beat.rank} (process {beat.pid} on {beat.host}) in phase {beat.phase} of step "
        f"{beat.step + 1} for {max(0.0, now - beat.progress):.0f} s"
        + (", frozen" if now - beat.time > FROZEN_BEATS * beat_s else "")
        for beat in stuck
    )
    others = len(beats) - len(stuck)
    waiting = f"; {others} waited" if others else ""
    return f"Stuck: {each}{waiting}. Python stacks are in {STACKS_FOLDER}/."
