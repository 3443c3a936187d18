"""The driver's watch over a training: who may train, with how many workers, and since when not."""

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dmuon_platform import cluster
from dmuon_platform.causes import STORAGE_AWAY, Cause
from dmuon_platform.elastic import NodeRoom, choose_workers, num_leaving, num_places
from dmuon_platform.errors import ClusterLost, GracefulStop, PlatformError
from dmuon_platform.heartbeat import Heartbeats
from dmuon_platform.progress import ProgressView
from dmuon_platform.pulse import beat_period_s
from dmuon_platform.ray_session import OWN_TRIES, RayLost, RaySession
from dmuon_platform.spec import JobSpec
from dmuon_platform.stall import describe_stall
from dmuon_platform.stop_request import After, StopFile, StopRequest, pause
from dmuon_platform.stop_signals import NAMES
from dmuon_platform.store import CheckpointStore
from dmuon_platform.supervisor import Planned
from dmuon_platform.waiting import wait_for_room

REFRESH_S = 0.5
"""Seconds between two looks at a training in motion."""

ROOM_S = 5.0
"""Seconds between two looks at the machines of the cluster."""

RETRY_S = 2.0
"""Seconds between two tries to reach a cluster, or to find room in it."""


class Driving:
    """Runs one attempt at a time and watches it. `run` is for the supervisor.

    Args:
        spec: The job.
        session: The connection to Ray.
        view: Shows the person who launched the job how it goes.
        launch: Whose requests to stop count.
        config: What workers are told beside the attempt's number.
    """

    def __init__(
        self,
        spec: JobSpec,
        session: RaySession,
        view: ProgressView,
        launch: str,
        config: Mapping[str, Any],
    ) -> None:
        self._spec = spec
        self._session = session
        self._view = view
        self._launch = launch
        self._config = {**config, "spec": spec.model_dump(mode="json"), "launch": launch}
        self._stops = StopFile(spec.run_dir)
        self._beats = Heartbeats(spec.run_dir)
        self._number = 0
        self._is_own = cluster.address_of(spec) is None

    def run(self) -> tuple[int, dict[str, Any] | Cause | Planned]:
        """Do one attempt; return its number, and its result or why it ended.

        Raises:
            GracefulStop: On request, before the workers trained or without an answer from them.
            PlatformError: There is no room, or no cluster, and none has come in time.
        """
        try:
            self._number = CheckpointStore(self._spec.run_dir).acquire_attempt()
        except OSError as error:  # a full disk: what failed before is what the user should read
            self._number += 1
            text = f"No attempt could begin, since {self._spec.run_dir} cannot be written: {error}"
            is_loss = error.errno in STORAGE_AWAY
            return self._number, Cause(text, "", may_repeat=True, is_loss=is_loss)
        attempt = self._number
        try:
            self._connect()
            room = wait_for_room(self._spec, self._session, self.pause, self._view.say)
            outcome = self._attempt(attempt, *room)
        except RayLost as lost:
            self._session.close(at_once=True)
            outcome = Cause(f"The connection to Ray is lost: {lost}.", "", is_loss=True)
        if isinstance(outcome, Cause) and outcome.leaves_workers:
            self._session.close()
        return attempt, self._sorted(attempt, outcome)

    def _attempt(self, attempt: int, num_workers: int, leaving: int) -> dict[str, Any] | Cause:
        self._beats.clear()
        self._stops.remove_restart(self._launch)
        self._session.start_attempt(num_workers, {**self._config, "attempt": attempt})
        return self._watch(_Watched(attempt, num_workers, leaving))

    def pause(self, seconds: float) -> None:
        """Wait, unless somebody asks to stop.

        Raises:
            GracefulStop: Somebody does.
        """
        pause(self._stops, self._launch, seconds)

    def _connect(self) -> None:
        self.pause(0)
        started, tries = time.monotonic(), 0
        while not self._session.is_connected:
            tries += 1
            try:
                self._session.connect()
            except (PlatformError, RuntimeError) as problem:
                self._session.close(at_once=True)
                waited_s = time.monotonic() - started
                limit_s = self._spec.faults.node_wait_s
                if tries >= OWN_TRIES if self._is_own else waited_s > limit_s:
                    raise ClusterLost(
                        f"The cluster is gone, and was not back within {waited_s:.0f} s "
                        f"(faults.node_wait_s = {limit_s:g}): {problem}\nRun the job again when "
                        "there is one: it goes on from the newest checkpoint."
                    ) from problem
                if tries == 1:
                    self._view.say(f"waiting for the Ray cluster to come back: {problem}")
                self.pause(RETRY_S)

    def _watch(self, watched: "_Watched") -> dict[str, Any] | Cause:
        while (outcome := self._session.look()) is None:
            time.sleep(REFRESH_S)
            self._view.refresh()
            self._end_without_answer(watched)
            self._ask_for_other_workers(watched)
            self._end_in_silence(watched)
        self._view.refresh()
        return outcome

    def _end_without_answer(self, watched: "_Watched") -> None:
        """End when there was a request for `faults.grace_s`, or there is nothing to save yet."""
        request = self._stops.read(self._launch)
        if request is None or request.after != After.END:
            return
        if watched.asked is None:
            watched.asked = time.monotonic()
            self._view.end()
            if request.reason not in NAMES.values():  # of those who launched it was told at once
                self._view.say(f"{request.by} asks to stop: {request.reason}")
        waited_s = time.monotonic() - watched.asked
        is_training = bool(self._beats.read(watched.attempt))
        if is_training and waited_s < self._spec.faults.grace_s:
            return
        self._session.close(at_once=True)
        saved = self._view.checkpoint
        raise GracefulStop(
            f"Stopped ({request.reason}) without a checkpoint at the end: "
            + ("it took longer than faults.grace_s." if is_training else "it had not begun.")
            + (f" The newest is of step {saved}." if saved else "")
        )

    def _ask_for_other_workers(self, watched: "_Watched") -> None:
        if time.monotonic() - watched.looked < ROOM_S:
            return
        watched.looked = time.monotonic()
        # Ray could not tell now (should it be lost, `look` says so), or a full disk has no room for
        # the request: the next look tries again.
        with suppress(RuntimeError, OSError):
            nodes = self._session.room()
            if num_leaving(nodes) > watched.leaving:
                self._restart("a machine is about to leave the cluster")
            elif self._has_grown(nodes, watched):
                self._restart("there is room for more workers")

    def _has_grown(self, nodes: list[NodeRoom], watched: "_Watched") -> bool:
        better = choose_workers(self._spec, num_places(self._spec, nodes) + watched.num_workers)
        have_places = bool(self._beats.read(watched.attempt))  # before, those are free themselves
        if not have_places or better is None or better <= watched.num_workers:
            watched.roomy = None
            return False
        watched.roomy = watched.roomy or time.monotonic()
        return time.monotonic() - watched.roomy >= self._spec.faults.grow_after_s

    def _restart(self, reason: str) -> None:
        if self._stops.read(self._launch) is None:
            self._stops.write(StopRequest.now(self._launch, reason, After.RESTART))

    def _end_in_silence(self, watched: "_Watched") -> None:
        """Give an attempt up of which Ray would say nothing any more."""
        ranks, controller = self._beats.signs(watched.attempt)
        silence_s = watched.ranks.silence_s(ranks)
        if silence_s > self._spec.faults.slow_stall_s:
            raise RayLost(f"no worker has been heard of for {silence_s:.0f} s")
        silence_s = watched.controller.silence_s(controller)
        if controller and silence_s > self._spec.faults.stall_s:
            raise RayLost(
                "the process that steers the workers (Ray's controller) has not been heard of for "
                f"{silence_s:.0f} s"
            )

    def _sorted(
        self, attempt: int, outcome: dict[str, Any] | Cause
    ) -> dict[str, Any] | Cause | Planned:
        if isinstance(outcome, Cause):
            beats = self._beats.read(attempt)
            stall = describe_stall(beats, beat_period_s(self._spec.faults))
            is_stall = outcome.is_hang or any(beat.is_stuck for beat in beats)
            return outcome.explained(stall) if is_stall and stall and not outcome.final else outcome
        stopped = outcome.get("stopped")
        if stopped is None:
            return outcome
        if stopped["after"] == After.RESTART:
            return Planned(stopped["reason"])
        text = f"Stopped after step {stopped['step']} ({stopped['reason']})"
        if stopped["checkpoint"] == stopped["step"]:
            text += ", with a checkpoint."
        else:
            text += f"; the checkpoint failed, the newest is of step {stopped['checkpoint']}."
        return Cause(text, "", final=GracefulStop(text))


class _Watched:
    """What is remembered of an attempt while it is watched; times are monotonic."""

    def __init__(self, attempt: int, num_workers: int, leaving: int) -> None:
        self.attempt = attempt
        self.num_workers = num_workers
        self.leaving = leaving
        self.looked = time.monotonic()
        self.ranks, self.controller = _Heard(), _Heard()
        self.asked: float | None = None
        self.roomy: float | None = None


class _Heard:
    """Since when there is no new sign of something; by the clock of this process alone."""

    def __init__(self) -> None:
        self._sign = 0
        self._since = time.monotonic()

    def silence_s(self, sign: int) -> float:
        """Return for how long the newest sign has been this one."""
        if sign != self._sign:
            self._sign, self._since = sign, time.monotonic()
        return time.monotonic() - self._since
