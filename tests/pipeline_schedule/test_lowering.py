"""Messages: both ends of a channel agree on their order, and receives are posted before they are needed."""

from __future__ import annotations

import doctest
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import schedules

import toolkit.pipeline_schedule.lowering
from toolkit.pipeline_schedule import (
    Backward,
    Compute,
    Durations,
    Forward,
    Message,
    ReceiveActivation,
    ReceiveGradient,
    Schedule,
    SendActivation,
    SendGradient,
    actions,
    build_schedule,
    simulate,
)
from toolkit.pipeline_schedule.lowering import counterpart, received_before

ONLY_FORWARD_HIDES = [("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h1", 3)]


def test_doctests() -> None:
    result = doctest.testmod(toolkit.pipeline_schedule.lowering)
    assert (result.failed, result.attempted) == (0, 2)


@settings(deadline=None, max_examples=60)
@given(schedules(), st.integers(0, 3))
def test_a_channel_is_sent_and_received_in_one_order(schedule: Schedule, lookahead: int) -> None:
    streams = [actions(schedule, rank, lookahead=lookahead) for rank in range(schedule.pp)]
    sent, received = defaultdict(list), defaultdict(list)
    for rank, stream in enumerate(streams):
        for action in stream:
            if isinstance(action, SendActivation | SendGradient):
                receive = counterpart(schedule, rank, action)
                assert counterpart(schedule, action.peer, receive) == action
                sent[rank, action.peer, type(receive)].append(receive)
            elif isinstance(action, ReceiveActivation | ReceiveGradient):
                received[action.peer, rank, type(action)].append(action)
    assert sent == received
    inner = schedule.num_stages - 1 if schedule.pp > 1 else 0
    assert sum(map(len, sent.values())) == 2 * inner * schedule.micro_batches
    assert simulate(schedule, streams=streams).spans


@settings(deadline=None, max_examples=60)
@given(schedules())
def test_a_receive_is_posted_one_instruction_ahead(schedule: Schedule) -> None:
    for rank in range(schedule.pp):
        waiting: dict[Message, int] = {}
        computed = 0
        for action in actions(schedule, rank):
            if isinstance(action, ReceiveActivation | ReceiveGradient):
                waiting[action] = computed
            elif isinstance(action, Compute):
                if (needed := received_before(schedule, rank, action)) is not None:
                    assert waiting.pop(needed) == max(0, computed - 1), "one buffer of each kind is enough"
                computed += 1
        assert not waiting


def test_a_receive_that_is_needed_late_is_posted_in_the_order_of_the_sends() -> None:
    forwards = [Forward(chunk=0, micro_batch=micro_batch) for micro_batch in range(4)]
    backwards = [Backward(chunk=0, micro_batch=micro_batch) for micro_batch in range(4)]
    schedule = Schedule(
        name="gpipe", pp=2, micro_batches=4, order=((*forwards, *backwards), (*reversed(forwards), *backwards))
    )
    posted = [action.micro_batch for action in actions(schedule, 1) if isinstance(action, ReceiveActivation)]
    assert posted == [0, 1, 2, 3]
    assert simulate(schedule).makespan == 4 + 4 + 8 + 2


@pytest.mark.parametrize(("name", "virtual_stages"), ONLY_FORWARD_HIDES)
def test_messages_hide_behind_compute(name: str, virtual_stages: int) -> None:
    """Past filling and draining a message costs nothing if its receive is posted ahead, and much if it is not."""

    def exposed(micro_batches: int, lookahead: int) -> float:
        schedule = build_schedule(name, pp=4, micro_batches=micro_batches, virtual_stages=virtual_stages)
        streams = [actions(schedule, rank, lookahead=lookahead) for rank in range(4)]
        durations = Durations(transfer=0.25)
        return simulate(schedule, durations, streams=streams).makespan - simulate(schedule).makespan

    assert exposed(32, 1) == pytest.approx(exposed(8, 1))
    assert exposed(32, 0) > exposed(8, 0) + 2


def test_there_is_no_message_within_a_rank() -> None:
    schedule = build_schedule("interleaved", pp=1, micro_batches=3, virtual_stages=3)
    assert actions(schedule, 0) == schedule.order[0]
