"""Every step of every schedule against the formula written another way."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.optim import slow
from vitrail.core.errors import ConfigError
from vitrail.optim.config import Schedule
from vitrail.optim.schedules import check_warmup, learning_rate, learning_rates


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine", "poly", "steps"])
@pytest.mark.parametrize("warmup", [0, 1, 10, 99])
@pytest.mark.parametrize("end", [0.0, 1e-5])
@pytest.mark.parametrize("total", [100, 137])
def test_every_step(decay, warmup, end, total):
    schedule = Schedule(decay=decay, warmup=warmup, end=end, milestones=(0.07, 0.3, 0.57, 0.9))
    wanted = slow.schedule(schedule, 3e-3, total)
    assert [learning_rate(step, schedule, base=3e-3, total=total) for step in range(total)] == pytest.approx(
        wanted, rel=1e-12, abs=1e-18
    )


def test_the_papers_corners():
    schedule = Schedule(decay="linear", warmup=10_000, end=1e-5)
    assert learning_rate(0, schedule, base=1e-3, total=312_000) == 0
    assert learning_rate(5_000, schedule, base=1e-3, total=312_000) == 5e-4
    assert learning_rate(10_000, schedule, base=1e-3, total=312_000) == 1e-3
    assert learning_rate(312_000, schedule, base=1e-3, total=312_000) == 1e-5
    assert learning_rate(400_000, schedule, base=1e-3, total=312_000) == 1e-5
    cosine = Schedule(decay="cosine", warmup=100)
    assert learning_rate(300, cosine, base=0.03, total=500) == pytest.approx(0.015)
    assert learning_rate(500, cosine, base=0.03, total=500) == 0


def eomt_rates(step: int, warmup: tuple[int, int], total: int, power: float) -> tuple[float, float]:
    """The rates of the head and of the encoder as EoMT's schedule computes them, of a base of 1."""
    head, encoder = warmup
    new = step / head if step < head else (1 - (step - head) / (total - head)) ** power
    if step < head:
        return new, 0.0
    if step < head + encoder:
        return new, (step - head) / encoder
    return new, (1 - (step - head - encoder) / (total - head - encoder)) ** power


@pytest.mark.parametrize(("warmup", "total"), [((500, 1000), 2000), ((0, 7), 40), ((5, 1), 8)])
def test_the_encoder_warms_up_after_the_head(warmup, total):
    schedule = Schedule(decay="poly", warmup=warmup[0], encoder_warmup=warmup[1], power=0.9)
    for step in range(total):
        wanted = [2.0 * rate for rate in eomt_rates(step, warmup, total, 0.9)]
        assert learning_rates(step, schedule, base=2.0, total=total) == pytest.approx(wanted, rel=1e-12)


def test_one_warm_up_is_of_head_and_encoder_alike():
    schedule = Schedule(decay="cosine", warmup=10)
    for step in range(100):
        rate = learning_rate(step, schedule, base=1e-3, total=100)
        assert learning_rates(step, schedule, base=1e-3, total=100) == (rate, rate)


def test_bits_milestones_are_met_to_the_step():
    schedule = Schedule(decay="steps")
    rates = [learning_rate(step, schedule, base=3e-3, total=500) for step in range(500)]
    assert [step for step in range(1, 500) if rates[step] != rates[step - 1]] == [150, 300, 450]
    assert rates[::150] == pytest.approx([3e-3, 3e-4, 3e-5, 3e-6])
    for percent in range(1, 100):
        one = Schedule(decay="steps", milestones=(percent / 100,))
        assert [learning_rate(step, one, base=1.0, total=100) for step in (percent - 1, percent)] == [1.0, 0.1]


@given(
    st.sampled_from(["constant", "linear", "cosine", "poly", "steps"]),
    st.integers(0, 50),
    st.integers(51, 400),
    st.floats(1e-6, 1.0),
)
def test_up_then_never_up_again_and_within_bounds(decay, warmup, total, base):
    schedule = Schedule(decay=decay, warmup=warmup)
    rates = [learning_rate(step, schedule, base=base, total=total) for step in range(total + 1)]
    assert all(0 <= value <= base and math.isfinite(value) for value in rates)
    if decay != "steps":  # whose first milestones may lie inside the warm-up
        assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


@pytest.mark.parametrize(("warmup", "total"), [(500, 500), (500, 100), (0, 0)])
def test_a_warm_up_that_leaves_nothing_is_refused(warmup, total):
    schedule = Schedule(warmup=warmup)
    for ask in (lambda: learning_rate(0, schedule, base=1e-3, total=total), lambda: check_warmup(schedule, total)):
        with pytest.raises(ConfigError, match=rf"schedule\.warmup={warmup} .*number of steps, {total}"):
            ask()


@pytest.mark.parametrize("warmup", [0, 40])
def test_two_warm_ups_that_leave_nothing_are_refused(warmup):
    schedule = Schedule(warmup=warmup, encoder_warmup=100 - warmup)
    with pytest.raises(ConfigError, match="encoder_warmup"):
        learning_rates(0, schedule, base=1e-3, total=100)
    learning_rates(0, schedule, base=1e-3, total=101)


@pytest.mark.parametrize("fields", [{"encoder_warmup": -1}, {"power": 0.0}])
def test_what_a_schedule_cannot_be(fields):
    with pytest.raises(ConfigError):
        Schedule(**fields)
