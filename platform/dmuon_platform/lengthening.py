"""A run that goes on beyond the end that it was given before."""

from collections.abc import Mapping, Sequence
from typing import Any

from dmuon_platform.event_facts import whole
from dmuon_platform.schedule import lr_multiplier
from dmuon_platform.spec import JobSpec


def rise_of_rate(spec: JobSpec, events: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the sentence that the learning rate rises again, None where it does not.

    A schedule belongs to the length of the job, so it comes down once more. That is told once,
    before the first step beyond the earlier end.
    """
    kinds = [event["kind"] for event in events]
    if "trained" not in kinds:
        return None
    place = len(kinds) - 1 - kinds[::-1].index("trained")
    done = whole(events[place], "step")
    if not done or done >= spec.num_steps or "training_started" in kinds[place:]:
        return None
    before = lr_multiplier(spec.schedule, done, done - 1)
    after = lr_multiplier(spec.schedule, spec.num_steps, done)
    if after <= before:
        return None
    return (
        f"the learning rate rises again after step {done}, from {before:.3g} to {after:.3g} of the "
        f"full one: schedule.kind={spec.schedule.kind} comes down at the end of all "
        f"{spec.num_steps} steps"
    )
