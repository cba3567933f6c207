"""ZB-H1 with one stage a rank and with several: its passes, what it keeps, and how long it idles beside its neighbours."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.pipeline_schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Durations,
    Forward,
    Schedule,
    bubble_fraction,
    build_schedule,
    simulate,
)

RANKS, MICRO_BATCHES, CHUNKS = st.integers(1, 8), st.integers(1, 24), st.integers(1, 4)
PASS = st.floats(0.1, 4)


def zb(pp: int, micro_batches: int, chunks: int) -> Schedule:
    return build_schedule("zb-h1", pp=pp, micro_batches=micro_batches, virtual_stages=chunks)


def interleaved(pp: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B where there is nothing to interleave."""
    name = "interleaved" if chunks > 1 else "1f1b"
    return build_schedule(name, pp=pp, micro_batches=micro_batches, virtual_stages=chunks)


def idle(schedule: Schedule, durations: Durations | None = None) -> float:
    timeline = simulate(schedule, durations)
    return timeline.makespan - timeline.busy(0)


def most_between_halves(order: tuple[Compute, ...]) -> int:
    """The most passes whose input gradient is computed and whose weight gradients are not."""
    most = waiting = 0
    for instruction in order:
        waiting += isinstance(instruction, BackwardInput)
        most = max(most, waiting)
        waiting -= isinstance(instruction, BackwardWeight)
    return most


@settings(deadline=None, max_examples=30)
@given(RANKS, MICRO_BATCHES, CHUNKS)
def test_each_pass_is_done_once_and_in_order(pp: int, micro_batches: int, chunks: int) -> None:
    schedule = zb(pp, micro_batches, chunks)
    simulate(schedule)  # neither invalid nor deadlocked
    for rank, order in enumerate(schedule.order):
        place = {instruction: index for index, instruction in enumerate(order)}
        assert len(place) == len(order)
        for chunk in range(chunks):
            for number in range(micro_batches):
                passes: list[Compute] = [Forward(chunk=chunk, micro_batch=number)]
                if rank == chunk == 0:
                    passes.append(Backward(chunk=chunk, micro_batch=number))
                else:
                    passes.append(BackwardInput(chunk=chunk, micro_batch=number))
                    passes.append(BackwardWeight(chunk=chunk, micro_batch=number))
                places = [place.pop(instruction) for instruction in passes]
                assert places == sorted(places)
        assert not place, "nothing else is done"


@settings(deadline=None, max_examples=30)
@given(RANKS, MICRO_BATCHES, CHUNKS)
def test_the_passes_of_a_kind_follow_each_other_as_in_interleaved(pp: int, micro_batches: int, chunks: int) -> None:
    def of_kind(order: tuple[Compute, ...], *kinds: type[Compute]) -> list[tuple[int, int]]:
        return [(one.chunk, one.micro_batch) for one in order if isinstance(one, kinds)]

    for ours, theirs in zip(
        zb(pp, micro_batches, chunks).order, interleaved(pp, micro_batches, chunks).order, strict=True
    ):
        assert of_kind(ours, Forward) == of_kind(theirs, Forward)
        assert of_kind(ours, Backward, BackwardInput) == of_kind(theirs, Backward)


@settings(deadline=None, max_examples=30)
@given(RANKS, MICRO_BATCHES, CHUNKS)
def test_rank_r_keeps_what_r_late_weight_gradients_need(pp: int, micro_batches: int, chunks: int) -> None:
    """r + 1 passes are between their halves while the oldest is computed; activations exceed interleaved's by at most r."""
    schedule, whole = zb(pp, micro_batches, chunks), interleaved(pp, micro_batches, chunks)
    for rank, order in enumerate(schedule.order):
        split = any(isinstance(instruction, BackwardInput) for instruction in order)
        assert split == (rank > 0 or chunks > 1)
        assert most_between_halves(order) == (min(rank + 1, micro_batches * chunks) if split else 0)
        assert schedule.peak_in_flight(rank) <= whole.peak_in_flight(rank) + rank
    assert schedule.peak_in_flight(0) <= whole.peak_in_flight(0)


@settings(deadline=None, max_examples=20)
@given(RANKS, MICRO_BATCHES, st.integers(2, 4), PASS, PASS, PASS)
def test_several_stages_a_rank_idle_no_longer_than_interleaved_or_one_stage(
    pp: int, micro_batches: int, chunks: int, forward: float, backward: float, weight: float
) -> None:
    """With stages that take equally long; a stage of several is as many times shorter."""
    each = Durations(forward=forward, backward_input=backward, backward_weight=weight)
    ours = idle(zb(pp, micro_batches, chunks), each) / chunks
    assert ours <= idle(interleaved(pp, micro_batches, chunks), each) / chunks + 1e-9
    assert ours <= idle(zb(pp, micro_batches, 1), each) + 1e-9


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("rounds", [1, 2, 4, 8])
def test_two_stages_a_rank_idle_a_third_of_interleaved(pp: int, rounds: int) -> None:
    schedules = [make(pp, pp * rounds, 2) for make in (zb, interleaved)]
    ours, theirs = map(idle, schedules)
    assert (ours, theirs) == (pp - 1, 3 * (pp - 1))
    shares = [bubble_fraction(one.name, pp=pp, micro_batches=pp * rounds, virtual_stages=2) for one in schedules]
    assert shares[0] == pytest.approx((pp - 1) / (6 * pp * rounds + pp - 1))
    assert shares[0] < shares[1]
