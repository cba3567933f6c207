"""A run on paper: times by hand for a small pipeline, and every way in which a schedule can be wrong is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule_cases import schedules

from toolkit.errors import PlanError
from toolkit.pipeline_schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Durations,
    Forward,
    Instruction,
    ReceiveActivation,
    Schedule,
    SendActivation,
    SendGradient,
    actions,
    build_schedule,
    simulate,
)
from toolkit.topology.communicators import MAX_SENDS_IN_FLIGHT

F = [Forward(chunk=0, micro_batch=micro_batch) for micro_batch in range(3)]
B = [Backward(chunk=0, micro_batch=micro_batch) for micro_batch in range(3)]


def test_times_by_hand() -> None:
    schedule = build_schedule("1f1b", pp=2, micro_batches=2)
    timeline = simulate(schedule, Durations(forward=1, backward_input=1, backward_weight=1, transfer=0.5))
    first, last = ([(type(s.instruction), s.start, s.end) for s in spans] for spans in timeline.spans)
    assert first == [(Forward, 0, 1), (Forward, 1, 2), (Backward, 5, 7), (Backward, 8, 10)]
    assert last == [(Forward, 1.5, 2.5), (Backward, 2.5, 4.5), (Forward, 4.5, 5.5), (Backward, 5.5, 7.5)]
    assert timeline.makespan == 10
    assert timeline.busy(0) == 6
    assert timeline.bubble_fraction_of(0) == pytest.approx(0.4)
    assert timeline.bubble_fraction == pytest.approx(0.4)


def test_stages_may_differ() -> None:
    schedule = build_schedule("gpipe", pp=2, micro_batches=2)
    slow = Durations(forward=3, backward_input=3, backward_weight=3)
    timeline = simulate(schedule, [Durations(), slow])
    assert timeline.makespan == 1 + 2 * 9 + 2
    assert timeline.bubble_fraction_of(0) > timeline.bubble_fraction_of(1)
    with pytest.raises(ValueError, match="3 durations are given for 2 stages"):
        simulate(schedule, [slow] * 3)


def of_two(first: list[Instruction], last: list[Instruction], *, micro_batches: int = 1) -> Schedule:
    return Schedule(name="1f1b", pp=2, micro_batches=micro_batches, order=(tuple(first), tuple(last)))  # type: ignore[arg-type]


WRONG_ORDERS = [
    (of_two([F[0]], [F[0], B[0]]), "rank 0, Backward(chunk=0, micro_batch=0): it is missing"),
    (of_two([B[0], F[0]], [F[0], B[0]]), "rank 0, Backward(chunk=0, micro_batch=0): Forward(chunk=0, micro_batch=0)"),
    (of_two([F[0], F[0], B[0]], [F[0], B[0]]), "rank 0, Forward(chunk=0, micro_batch=0): it is done twice"),
    (of_two([F[0], B[0], B[0]], [F[0], B[0]]), "rank 0, Backward(chunk=0, micro_batch=0): it is done twice"),
    (of_two([F[0], B[0]], [F[0], B[0], F[1]]), "rank 1, Forward(chunk=0, micro_batch=1): there is no such"),
    (
        of_two([F[0], BackwardInput(chunk=0, micro_batch=0)], [F[0], B[0]]),
        "rank 0, BackwardWeight(chunk=0, micro_batch=0): it is missing",
    ),
    (
        of_two([F[0], BackwardWeight(chunk=0, micro_batch=0)], [F[0], B[0]]),
        "rank 0, BackwardWeight(chunk=0, micro_batch=0): BackwardInput(chunk=0, micro_batch=0) does not precede it",
    ),
    (
        of_two([F[0], B[0], BackwardWeight(chunk=0, micro_batch=0)], [F[0], B[0]]),
        "rank 0, BackwardWeight(chunk=0, micro_batch=0): it is done twice",
    ),
    (of_two([F[0], B[0]], []), "rank 1, Forward(chunk=0, micro_batch=0): it is missing"),
]


@pytest.mark.parametrize(("schedule", "message"), WRONG_ORDERS, ids=[message[:60] for _, message in WRONG_ORDERS])
def test_a_wrong_order_is_found(schedule: Schedule, message: str) -> None:
    with pytest.raises(PlanError) as error:
        simulate(schedule)
    assert message in str(error.value)
    assert error.value.codes in (("SCHEDULE_INVALID",), ("SCHEDULE_DEADLOCK",))


def test_a_chunk_before_its_predecessor_on_the_same_rank_is_found() -> None:
    order = [Forward(chunk=1, micro_batch=0), Forward(chunk=0, micro_batch=0)]
    schedule = Schedule(name="interleaved", pp=1, micro_batches=1, virtual_stages=2, order=(tuple(order),))
    with pytest.raises(PlanError, match=r"rank 0, Forward.chunk=1, micro_batch=0.: Forward.chunk=0, micro_batch=0."):
        simulate(schedule)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    """Rank 0 wants a gradient of what it has not sent yet."""
    schedule = of_two([F[0], B[0], F[1], B[1]], [F[0], F[1], B[0], B[1]], micro_batches=2)
    with pytest.raises(PlanError) as error:
        simulate(schedule)
    assert error.value.codes == ("SCHEDULE_DEADLOCK",)
    assert (
        "rank 0 waits at Backward(chunk=0, micro_batch=0) for SendGradient(chunk=0, micro_batch=0, peer=0) of rank 1"
        in (str(error.value))
    )
    assert (
        "rank 1 waits at Forward(chunk=0, micro_batch=1) for SendActivation(chunk=0, micro_batch=1, peer=1) of rank 0"
        in (str(error.value))
    )


Stream = list[Instruction]


def without(kind: type[Instruction], micro_batch: int) -> Callable[[Stream], Stream]:
    return lambda stream: [one for one in stream if not (isinstance(one, kind) and one.micro_batch == micro_batch)]


def twice(kind: type[Instruction]) -> Callable[[Stream], Stream]:
    return lambda stream: [copy for one in stream for copy in ([one, one] if isinstance(one, kind) else [one])]


def swapped(kind: type[Instruction]) -> Callable[[Stream], Stream]:
    """All of a kind at the place of the first of them, backwards."""

    def change(stream: Stream) -> Stream:
        found = [one for one in stream if isinstance(one, kind)]
        rest = [one for one in stream if not isinstance(one, kind)]
        place = next(i for i, one in enumerate(stream) if isinstance(one, kind))
        return rest[:place] + found[::-1] + rest[place:]

    return change


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (1, without(ReceiveActivation, 1), "rank 1, Forward(chunk=0, micro_batch=1): ReceiveActivation"),
        (0, without(SendActivation, 1), "the orders of a channel differ"),
        (0, without(SendActivation, 2), "rank 1 waits at Forward(chunk=0, micro_batch=2)"),
        (1, twice(ReceiveActivation), "rank 1, ReceiveActivation(chunk=0, micro_batch=0, peer=0): it is posted twice"),
        (0, twice(SendActivation), "rank 0, SendActivation(chunk=0, micro_batch=0, peer=1): it is sent twice"),
        (1, swapped(ReceiveActivation), "rank 1, ReceiveActivation(chunk=0, micro_batch=2, peer=0): rank 0 sends"),
        (1, swapped(SendGradient), "what it sends has not been computed"),
        (
            1,
            lambda stream: [*stream, ReceiveActivation(chunk=0, micro_batch=7, peer=0)],
            "rank 1, ReceiveActivation(chunk=0, micro_batch=7, peer=0): nothing uses what it receives",
        ),
        (
            0,
            lambda stream: [*stream, SendActivation(chunk=0, micro_batch=7, peer=1)],
            "rank 0, SendActivation(chunk=0, micro_batch=7, peer=1): what it sends has not been computed",
        ),
    ],
)
def test_a_wrong_message_is_found(rank: int, change: Callable[[Stream], Stream], message: str) -> None:
    schedule = build_schedule("1f1b", pp=2, micro_batches=3)
    streams = [list(actions(schedule, each)) for each in range(2)]
    simulate(schedule, streams=streams)
    streams[rank] = change(streams[rank])
    with pytest.raises(PlanError) as error:
        simulate(schedule, streams=streams)
    assert message in str(error.value)


@settings(deadline=None, max_examples=60)
@given(schedules(), st.sampled_from([0.0, 0.1]))
def test_ranks_that_wait_for_what_they_have_sent_end_as_soon(schedule: Schedule, transfer: float) -> None:
    assume(schedule.virtual_stages == 1)
    durations = Durations(transfer=transfer)
    waiting = simulate(schedule, durations, under_way=MAX_SENDS_IN_FLIGHT)
    assert waiting.makespan == pytest.approx(simulate(schedule, durations).makespan)


def test_beside_virtual_stages_they_may_wait_for_ever() -> None:
    schedule = build_schedule("interleaved", pp=4, micro_batches=11, virtual_stages=2)
    simulate(schedule)
    with pytest.raises(PlanError, match="never ends"):
        simulate(schedule, under_way=MAX_SENDS_IN_FLIGHT)
