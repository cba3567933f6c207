"""Interleaved schedules and what they ask for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.pipeline_schedule import (
    build_schedule,
)
from toolkit.pipeline_schedule.interleaved import round_sizes


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 8), st.integers(1, 24), st.integers(2, 4))
def test_activations_in_flight_with_chunks(pp: int, micro_batches: int, virtual_stages: int) -> None:
    size = round_sizes(pp, micro_batches)[0]
    everything = micro_batches * virtual_stages
    one = build_schedule("interleaved", pp=pp, micro_batches=micro_batches, virtual_stages=virtual_stages)
    assert [one.peak_in_flight(rank) for rank in range(pp)] == [
        min((virtual_stages - 1) * size + 2 * (pp - 1 - rank) + 1, everything) for rank in range(pp)
    ]
    two = build_schedule("zb-h1", pp=pp, micro_batches=micro_batches, virtual_stages=virtual_stages)
    assert {two.peak_in_flight(rank) for rank in range(pp)} == {min((virtual_stages - 1) * size + pp, everything)}
