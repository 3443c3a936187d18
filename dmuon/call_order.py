"""Do all ranks call the same things in the same order? Asked beside the work, not before it.

A rank that evaluates while another trains enters other collectives than its peers: at best
everybody waits for ever, at worst the buffers happen to fit and weights are exchanged in silence.
So each rank keeps a history of its calls, and at the start of a forward, a backward or a norm its
digest is gathered over a CPU group of our own while the work goes on. The answer is looked at
before the next call begins and before a step changes anything.
"""

import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist

from dmuon.counters import Counters
from dmuon.errors import CollectiveError, DMuonError

_NUM_SHOWN = 6  # calls of each rank that the error shows


class Call(IntEnum):
    """What a rank can do with a dedicated model that others must do with it."""

    NOTHING = 0
    FORWARD = 1
    EVALUATION = 2
    BACKWARD = 3
    BACKWARD_NO_SYNC = 4
    CLIP_GRAD_NORM = 5
    STEP = 6
    ZERO_GRAD = 7
    GET_MODEL_STATE_DICT = 8
    SET_MODEL_STATE_DICT = 9
    GET_OPTIMIZER_STATE_DICT = 10
    SET_OPTIMIZER_STATE_DICT = 11
    NONFINITE_GRADIENTS = 12
    SAVE_CHECKPOINT = 13
    LOAD_CHECKPOINT = 14
    NONFINITE_WEIGHTS = 15

    def __str__(self) -> str:
        return _SHOWN.get(self, self.name.lower())


_SHOWN = {
    Call.NOTHING: "-",
    Call.EVALUATION: "forward without gradients",
    Call.BACKWARD_NO_SYNC: "backward under no_sync",
    Call.CLIP_GRAD_NORM: "clip_grad_norm_",
}


class CallOrder:
    """The calls of this rank, compared with those of all others.

    Args:
        group: a CPU group over all ranks of the mesh, used for nothing else; None for a world of
            one, or where there is no CPU backend: then calls are only remembered.
        counters: where each exchange is counted, as "agreement".
    """

    def __init__(self, group: dist.ProcessGroup | None, counters: Counters) -> None:
        self._group = group
        self._counters = counters
        self._num_calls = 0
        self._digest = 0
        self._settings = 0
        self._recent: deque[Call] = deque([Call.NOTHING] * _NUM_SHOWN, maxlen=_NUM_SHOWN)
        self._everyones: list[torch.Tensor] = []
        self._pending: dist.Work | None = None
        self._failure: CollectiveError | None = None
        self._is_expected_by_all = False

    def note(self, call: Call) -> None:
        """Remember ``call``; the others hear of it with the next exchange. Local."""
        self._num_calls += 1
        self._digest = zlib.crc32(bytes([call]), self._digest)
        self._recent.append(call)

    def note_collective(self, kind: bytes, block: int) -> None:
        """Remember that a collective of ``block`` was entered. Local."""
        self._digest = zlib.crc32(kind + block.to_bytes(4, "little"), self._digest)

    def note_settings(self, settings: object) -> None:
        """Remember numbers that must be equal on all ranks, by what they look like. Local."""
        self._settings = zlib.crc32(repr(settings).encode(), self._settings)

    def begin(self, call: Call, expects: int = 0) -> None:
        """Note ``call`` and begin to compare. Collective over the mesh; asynchronous.

        Args:
            call: what this rank does.
            expects: in which ranks may differ; see ``is_expected_by_all``.

        Raises:
            CollectiveError: when the comparison begun before this one found a difference.
        """
        self.check()
        self.note(call)
        self._is_expected_by_all = False
        if self._group is None:
            return
        numbers = [self._num_calls, self._digest, self._settings, *self._recent, expects]
        mine = torch.tensor(numbers)
        self._everyones = [torch.empty_like(mine) for _ in range(self._group.size())]
        self._counters.count("agreement", mine.nbytes)
        with self.explained(f"telling the other ranks of this rank's {call}"):
            self._pending = dist.all_gather(self._everyones, mine, group=self._group, async_op=True)

    def begin_and_check(self, call: Call) -> None:
        """Note ``call`` and compare before anything of it is done. Collective over the mesh.

        Raises:
            CollectiveError: on every rank, when the calls differ.
        """
        self.begin(call)
        self.check()

    def check(self) -> None:
        """Look at the answer of the comparison begun last. Local, after all ranks have begun it.

        Raises:
            CollectiveError: when the calls differ; from then on at every call.
        """
        if self._failure is not None:
            raise self._failure
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with self.explained(f"waiting for the other ranks to reach this rank's {self._recent[-1]}"):
            pending.wait()
        self._compare()

    def is_expected_by_all(self) -> bool:
        """Whether all ranks began the last call with equal ``expects``. Local, as ``check``."""
        self.check()
        return self._is_expected_by_all

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Turn what a backend raises about a collective into one error that tells what to do.

        Raises:
            CollectiveError: for a collective that failed or ran into its timeout.
        """
        try:
            yield
        except DMuonError:
            raise
        except RuntimeError as error:  # also DistBackendError, DistNetworkError
            raise self._explain(what, error) from error

    def _explain(self, what: str, error: RuntimeError) -> CollectiveError:
        if self._failure is not None:
            return self._failure
        if self._pending is not None:
            try:
                self._pending.wait(timedelta(seconds=2))
                self._compare()
            except CollectiveError as failure:
                return failure
            except RuntimeError:
                pass  # the comparison did not get through either
        first_line = str(error).strip().split("\n", 1)[0]
        self._failure = CollectiveError(
            f"{what} did not succeed: another rank has failed, is stuck, does not make this "
            "call, which all ranks must (is it under `if rank == 0`?), or is slower than the "
            "timeout of the process group. The first error among the ranks is the cause. Last "
            f"calls of this rank: {_shown(self._recent)}. The backend says: {first_line}"
        )
        return self._failure

    def _compare(self) -> None:
        rows = [row.tolist() for row in self._everyones]
        self._is_expected_by_all = len({row.pop() for row in rows}) == 1
        if all(row[:3] == rows[0][:3] for row in rows):
            return
        differ = _distinct([row[3:] for row in rows])
        if all(row[:2] == rows[0][:2] for row in rows):
            ranks = ", ".join(str(rank) for rank, _ in _distinct([[row[2]] for row in rows]))
            message = (
                f"ranks {ranks} of the mesh have updated or clipped with different settings (lr, "
                "momentum, weight_decay, ..., max_norm), so each owner went its own way; let "
                "schedules follow the step, or a loss that is averaged over the ranks, and go back "
                "to the last checkpoint"
            )
        elif len(differ) == 1 and all(row[0] == rows[0][0] for row in rows):
            differ = _distinct([[row[1]] for row in rows])
            ranks = ", ".join(str(rank) for rank, _ in differ)
            message = (
                f"the ranks made the same calls, but ranks {ranks} of the mesh went through the "
                "blocks in different orders, so they exchanged the wrong weights; a block whose "
                "use depends on the data must be used on every rank, or share the hook boundary "
                "of its parent (hook_boundary_predicate). Last calls: " + _shown(rows[0][3:])
            )
        else:
            message = (
                "the ranks disagree about the order of calls, so what they exchanged since is "
                "void; each call on a dedicated model must be made by all of its ranks alike "
                "(is one under `if rank == 0`, as an evaluation?). Last calls:"
            ) + "".join(f"\n  rank {rank} of the mesh: {_shown(row)}" for rank, row in differ)
        self._failure = CollectiveError(message)
        raise self._failure


def _distinct(rows: list[list[int]]) -> list[tuple[int, list[int]]]:
    """The first rank of each different history."""
    seen: dict[tuple[int, ...], int] = {}
    for rank, row in enumerate(rows):
        seen.setdefault(tuple(row), rank)
    return [(rank, list(row)) for row, rank in seen.items()]


def _shown(calls: Iterator[int] | list[int] | deque[Call]) -> str:
    return ", ".join(str(Call(call)) for call in calls if call != Call.NOTHING) or "none"
