"""Every schedule of every size runs to its end, and holds as many activations as its paper says."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import schedules

import toolkit.pipeline_schedule.interleaved
from toolkit.errors import PlanError
from toolkit.pipeline_schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Schedule,
    build_schedule,
    simulate,
)


def test_doctests() -> None:
    result = doctest.testmod(toolkit.pipeline_schedule.interleaved)
    assert (result.failed, result.attempted) == (0, 1)


@settings(deadline=None, max_examples=100)
@given(schedules())
def test_every_schedule_is_sound(schedule: Schedule) -> None:
    timeline = simulate(schedule)
    for rank, order in enumerate(schedule.order):
        assert [span.instruction for span in timeline.spans[rank]] == list(order)
        assert timeline.busy(rank) == pytest.approx(3 * schedule.micro_batches * schedule.virtual_stages)
        forwards = [instruction for instruction in order if isinstance(instruction, Forward)]
        assert len(set(forwards)) == len(forwards) == schedule.micro_batches * schedule.virtual_stages


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 8), st.integers(1, 24))
def test_activations_in_flight_without_chunks(pp: int, micro_batches: int) -> None:
    def peaks(name: Any) -> list[int]:
        schedule = build_schedule(name, pp=pp, micro_batches=micro_batches)
        assert [schedule.peak_in_flight_of_stage(rank) for rank in range(pp)] == [
            schedule.peak_in_flight(rank) for rank in range(pp)
        ]
        return [schedule.peak_in_flight(rank) for rank in range(pp)]

    assert peaks("gpipe") == [micro_batches] * pp
    assert peaks("1f1b") == [min(pp - rank, micro_batches) for rank in range(pp)]
    assert peaks("zb-h1") == [min(pp, micro_batches)] * pp, (
        "arXiv 2401.10241, section 2.3: what 1F1B's first rank holds"
    )


def test_the_chunks_of_a_rank_are_told_apart() -> None:
    schedule = build_schedule("interleaved", pp=2, micro_batches=2, virtual_stages=2)
    assert schedule.num_stages == 4
    assert [schedule.place(stage) for stage in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [schedule.stage(*schedule.place(stage)) for stage in range(4)] == list(range(4))
    assert [schedule.peak_in_flight_of_stage(stage) for stage in range(4)] == [2, 2, 2, 1]
    assert schedule.peak_in_flight(1) == 3


def test_interleaved_of_megatrons_figure() -> None:
    """arXiv 2104.04473, figure 4: 4 ranks, 8 micro-batches, 2 chunks; the last rank's row, counted from 0."""
    schedule = build_schedule("interleaved", pp=4, micro_batches=8, virtual_stages=2)
    letters = {Forward: "F", Backward: "B"}
    row = [f"{letters[type(one)]}{one.chunk}.{one.micro_batch}" for one in schedule.order[3]]
    assert row[:4] == ["F0.0", "F0.1", "F0.2", "F0.3"]
    assert row[4:12] == ["F1.0", "B1.0", "F1.1", "B1.1", "F1.2", "B1.2", "F1.3", "B1.3"]
    assert row[12:16] == ["F0.4", "B0.0", "F0.5", "B0.1"]
    assert row[-4:] == ["B0.4", "B0.5", "B0.6", "B0.7"]


def test_zero_bubble_delays_weights_by_the_rank() -> None:
    schedule = build_schedule("zb-h1", pp=3, micro_batches=3)
    assert [type(one) for one in schedule.order[0] if not isinstance(one, Forward)] == [Backward] * 3
    assert [(type(one), one.micro_batch) for one in schedule.order[2]] == [
        (Forward, 0),
        (BackwardInput, 0),
        (Forward, 1),
        (BackwardInput, 1),
        (Forward, 2),
        (BackwardInput, 2),
        (BackwardWeight, 0),
        (BackwardWeight, 1),
        (BackwardWeight, 2),
    ]


@pytest.mark.parametrize(
    ("name", "sizes", "code", "part"),
    [
        ("gpipe", {"pp": 0}, "SCHEDULE_SIZE", "0 pipeline ranks"),
        ("1f1b", {"micro_batches": 0}, "SCHEDULE_SIZE", "0 micro-batches"),
        ("zb-h1", {"virtual_stages": 0}, "SCHEDULE_SIZE", "0 stages a rank"),
        ("interleaved", {}, "SCHEDULE_VIRTUAL_STAGES", "2 stages or more"),
        ("1f1b", {"virtual_stages": 2}, "SCHEDULE_VIRTUAL_STAGES", "interleaved or zb-h1"),
        ("gpipe", {"virtual_stages": 3}, "SCHEDULE_VIRTUAL_STAGES", "3 stages a rank"),
        ("dualpipe", {}, "SCHEDULE_UNKNOWN", "gpipe, 1f1b, interleaved, zb-h1"),
    ],
)
def test_what_cannot_be_built(name: Any, sizes: dict[str, int], code: str, part: str) -> None:
    with pytest.raises(PlanError) as error:
        build_schedule(name, **({"pp": 2, "micro_batches": 4} | sizes))
    assert error.value.codes == (code,)
    assert part in str(error.value)
