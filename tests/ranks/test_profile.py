"""A torch.profiler trace of a training step reads by itself."""

import pytest
from ranks_runner import run_ranks
from torch.profiler import ProfilerActivity, profile
from wrapped import backward, make_mesh, prepare

import dmuon

BLOCKS = [f"layers.{index}" for index in range(3)]
ON_1D = ["unshard", "wait_unshard", "reduce", "wait_reduce"]


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=str)
def test_every_part_of_a_step_has_a_span_of_a_stable_name(shape: tuple[int, ...]) -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(*shape))
        optimizer = dmuon.Muon(model)

        def step(number: int) -> None:
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()

        step(0)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            step(1)
        names = [event.name for event in trace.events() if event.name.startswith("dmuon::")]
        kinds = [*ON_1D, *(["publish", "wait_publish"] if len(shape) == 2 else [])]
        expected = {f"dmuon::{kind} {block}" for kind in kinds for block in BLOCKS}
        assert expected <= set(names)
        assert set(names) - expected == {"dmuon::newton_schulz"}
        assert names.count("dmuon::reduce layers.1") == 1
        assert names.count("dmuon::unshard layers.1") == 2  # forward and backward

    run_ranks(2, body)


def test_spans_of_newton_schulz_are_inside_the_optimizers_step() -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(1))
        optimizer = dmuon.Muon(model)
        backward(model, 0)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            optimizer.step()
        events = trace.events()
        whole = next(event for event in events if event.name.startswith("Optimizer.step#Muon"))
        inside = [event for event in events if event.name == "dmuon::newton_schulz"]
        assert inside
        for event in inside:
            assert whole.time_range.start <= event.time_range.start
            assert event.time_range.end <= whole.time_range.end

    run_ranks(1, body)
