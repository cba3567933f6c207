"""The bubble on paper is the bubble in theory."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import schedules

import toolkit.pipeline_schedule.bubble
from toolkit.pipeline_schedule import Durations, Schedule, bubble_fraction, build_schedule, simulate
from toolkit.pipeline_schedule.bubble import idle_time

durations = st.builds(
    Durations,
    forward=st.floats(0.1, 4),
    backward_input=st.floats(0.1, 4),
    backward_weight=st.floats(0.1, 4),
)


def test_doctests() -> None:
    result = doctest.testmod(toolkit.pipeline_schedule.bubble)
    assert (result.failed, result.attempted) == (0, 3)


@settings(deadline=None, max_examples=150)
@given(schedules(), durations)
def test_theory_and_simulation_agree(schedule: Schedule, each: Durations) -> None:
    sizes: dict[str, Any] = {
        "pp": schedule.pp,
        "micro_batches": schedule.micro_batches,
        "virtual_stages": schedule.virtual_stages,
    }
    timeline = simulate(schedule, each)
    assert bubble_fraction(schedule.name, durations=each, **sizes) == pytest.approx(timeline.bubble_fraction, abs=1e-9)
    idle = idle_time(schedule.name, durations=each, **sizes)
    if idle is not None:
        assert timeline.makespan == pytest.approx(timeline.busy(0) + idle)
    else:
        assert schedule.name == "zb-h1"
        assert schedule.micro_batches < schedule.pp
        assert schedule.virtual_stages > 1


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 8), st.integers(1, 6), st.integers(2, 4), st.floats(0.1, 4))
def test_the_papers_formulas(pp: int, rounds: int, virtual_stages: int, forward: float) -> None:
    """For a backward pass of twice the forward one, and of any other length but for ZB-H1."""
    m = pp * rounds
    each = Durations(forward=forward, backward_input=forward, backward_weight=forward)
    other = Durations(forward=forward, backward_input=0.7, backward_weight=0.2)

    def simulated(name: Any, chunks: int, taken: Durations) -> float:
        built = build_schedule(name, pp=pp, micro_batches=m, virtual_stages=chunks)
        return simulate(built, taken).bubble_fraction

    for taken in (each, other):
        for name in ("gpipe", "1f1b"):
            assert simulated(name, 1, taken) == pytest.approx((pp - 1) / (m + pp - 1), abs=1e-9)
        expected = (pp - 1) / (virtual_stages * m + pp - 1)
        assert simulated("interleaved", virtual_stages, taken) == pytest.approx(expected, abs=1e-9)
    # arXiv 2401.10241, table 1: (p - 1)(F + B - W), a third of 1F1B's (p - 1)(F + B + W).
    assert simulated("zb-h1", 1, each) == pytest.approx((pp - 1) / (3 * m + pp - 1), abs=1e-9)
    assert simulated("zb-h1", virtual_stages, each) == pytest.approx(
        (pp - 1) / (3 * virtual_stages * m + pp - 1), abs=1e-9
    )


def test_transfers_make_it_larger() -> None:
    plain = bubble_fraction("1f1b", pp=4, micro_batches=8)
    assert bubble_fraction("1f1b", pp=4, micro_batches=8, durations=Durations(transfer=0.1)) > plain


def test_few_micro_batches_cost_each_schedule_of_chunks_a_gap_a_round() -> None:
    assert bubble_fraction("interleaved", pp=4, micro_batches=2, virtual_stages=2) > 3 / (2 * 2 + 3)
