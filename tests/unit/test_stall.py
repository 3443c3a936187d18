"""Who held the others up, told from heartbeats."""

import pytest
from dmuon_platform.heartbeat import Heartbeat, Phase
from dmuon_platform.stall import describe_stall, stuck_ranks

BEAT_S = 5.0


def beat(rank, phase=Phase.COMPUTE, count=40, time=1000.0):
    return Heartbeat(1, rank, f"host{rank}", 100 + rank, 12, phase, count, 940.0, time)


@pytest.mark.parametrize(
    ("beats", "stuck"),
    [
        ([beat(0), beat(1, Phase.DATA, 39), beat(2)], [1]),  # its loader blocks
        ([beat(0), beat(1), beat(2, count=37, time=980.0)], [2]),  # frozen
        ([beat(0, count=37), beat(1, time=980.0)], [1]),  # frozen long before it was behind
        ([beat(0), beat(1)], [0, 1]),  # all in the same collective
        ([beat(0), beat(1, time=996.0)], [0, 1]),  # it has just not written yet
        ([], []),
    ],
)
def test_the_frozen_or_else_the_furthest_behind_is_stuck(beats, stuck):
    assert [each.rank for each in stuck_ranks(beats, BEAT_S)] == stuck


def test_the_description_says_where_and_since_when():
    beats = [beat(0), beat(1, Phase.DATA, 39), beat(2, count=38, time=970.0)]
    assert describe_stall(beats[:2], BEAT_S) == (
        "Stuck: rank 1 (process 101 on host1) in phase data of step 13 for 60 s; 1 waited. "
        "Python stacks are in stacks/."
    )
    assert "rank 2 (process 102 on host2)" in describe_stall(beats, BEAT_S)
    assert "frozen; 2 waited" in describe_stall(beats, BEAT_S)
    assert describe_stall([], BEAT_S) == ""
