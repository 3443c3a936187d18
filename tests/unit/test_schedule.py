from dataclasses import dataclass

import pytest
from dmuon_platform.schedule import lr_multiplier
from hypothesis import given
from hypothesis import strategies as st


@dataclass(frozen=True)
class Settings:
    kind: str = "cosine"
    warmup_steps: int = 0
    decay_steps: int | None = None
    min_ratio: float = 0.0


def curve(settings: Settings, num_steps: int) -> list[float]:
    return [lr_multiplier(settings, num_steps, step) for step in range(num_steps)]


def test_warm_up_rises_to_the_full_rate_and_never_starts_at_zero():
    rates = curve(Settings("constant", warmup_steps=4), 7)
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1])


def test_cosine_would_reach_its_minimum_after_the_last_step():
    settings = Settings("cosine", warmup_steps=1, min_ratio=0.1)
    rates = curve(settings, 7)
    assert rates[1] == 1.0
    assert rates[4] == pytest.approx(0.55)
    assert rates[-1] > 0.1
    assert lr_multiplier(settings, 7, 7) == pytest.approx(0.1)


def test_wsd_is_flat_and_falls_over_the_last_fifth():
    rates = curve(Settings("wsd", warmup_steps=2), 50)
    assert rates[2:41] == [1.0] * 39
    assert rates[40:] == pytest.approx([1 - i / 10 for i in range(10)])


def test_wsd_takes_its_own_length_of_the_fall():
    rates = curve(Settings("wsd", decay_steps=4, min_ratio=0.5), 10)
    assert rates[6:] == pytest.approx([1.0, 0.875, 0.75, 0.625])
    assert set(rates[:6]) == {1.0}


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="'linear'"):
        lr_multiplier(Settings("linear"), 10, 5)


@given(
    kind=st.sampled_from(["constant", "cosine", "wsd"]),
    num_steps=st.integers(1, 200),
    warmup=st.integers(0, 250),
    decay=st.none() | st.integers(0, 250),
    minimum=st.floats(0, 1),
)
def test_rates_rise_then_fall_and_stay_in_bounds(kind, num_steps, warmup, decay, minimum):
    settings = Settings(kind, warmup, decay, minimum)
    rates = curve(settings, num_steps)
    assert all(0 < rate <= 1 or (rate == 0 == minimum) for rate in rates)
    rising, falling = rates[: warmup + 1], rates[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(rate >= minimum - 1e-9 for rate in falling)
