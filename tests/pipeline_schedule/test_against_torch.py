"""The schedules beside those of torch.distributed.pipelining: the same order of compute, and its validators accept ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed.pipelining.schedules as theirs
from hypothesis import given, settings
from schedule_cases import schedules

from toolkit.pipeline_schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Schedule,
    actions,
    build_schedule,
)
from toolkit.pipeline_schedule.instructions import ReceiveActivation, ReceiveGradient, SendActivation, SendGradient

KINDS = {
    Forward: theirs._ComputationType.FORWARD,
    Backward: theirs._ComputationType.FULL_BACKWARD,
    BackwardInput: theirs._ComputationType.BACKWARD_INPUT,
    BackwardWeight: theirs._ComputationType.BACKWARD_WEIGHT,
    SendActivation: theirs._ComputationType.SEND_F,
    ReceiveActivation: theirs._ComputationType.RECV_F,
    SendGradient: theirs._ComputationType.SEND_B,
    ReceiveGradient: theirs._ComputationType.RECV_B,
}
OF_COMPUTE = tuple(KINDS.values())[:4]
SIZES = [(2, 2), (2, 5), (3, 7), (4, 4), (4, 16), (5, 11), (8, 24)]
# Their rounds must be equally large.
CHUNKED = [(2, 4, 2), (3, 6, 3), (4, 4, 2), (4, 16, 3), (4, 10, 2), (8, 16, 2), (4, 3, 2)]


def in_their_terms(schedule: Schedule, rank: int, stream: Any) -> list[theirs._Action]:
    return [theirs._Action(schedule.stage(rank, one.chunk), KINDS[type(one)], one.micro_batch) for one in stream]


def orders(schedule: Schedule) -> dict[int, list[theirs._Action]]:
    return {rank: in_their_terms(schedule, rank, schedule.order[rank]) for rank in range(schedule.pp)}


def compute_only(order: dict[int, list[Any]]) -> dict[int, list[theirs._Action]]:
    return {
        rank: [one for one in row if one is not None and one.computation_type in OF_COMPUTE]
        for rank, row in order.items()
    }


def without_process_group(kind: type[Any], **values: Any) -> Any:
    """One of their schedules, as far as its order needs it: its constructor wants live stages."""
    made = object.__new__(kind)
    vars(made).update(values)
    return made


@pytest.mark.parametrize(("pp", "micro_batches"), SIZES)
@pytest.mark.parametrize(("name", "kind"), [("gpipe", theirs.ScheduleGPipe), ("1f1b", theirs.Schedule1F1B)])
def test_plain_schedules_are_theirs(name: Any, kind: type[Any], pp: int, micro_batches: int) -> None:
    their = without_process_group(kind, _num_stages=pp, _n_microbatches=micro_batches)
    ours = build_schedule(name, pp=pp, micro_batches=micro_batches)
    order = compute_only(their._get_pipeline_order())
    if order[pp - 1][0].microbatch_index == 1:
        # torch 2.13 counts the forward passes of 1F1B's last rank from 1 in this listing, of which it runs nothing.
        order[pp - 1] = [
            one._replace(microbatch_index=one.microbatch_index - (one.computation_type == KINDS[Forward]))
            for one in order[pp - 1]
        ]
    assert orders(ours) == order


def of_chunks(kind: type[Any], pp: int, micro_batches: int, virtual_stages: int) -> dict[int, list[Any]]:
    their = without_process_group(
        kind,
        pp_group_size=pp,
        n_local_stages=virtual_stages,
        _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // max(1, micro_batches // pp),
    )
    return compute_only({rank: their._calculate_single_rank_operations(rank) for rank in range(pp)})


@pytest.mark.parametrize(("pp", "micro_batches", "virtual_stages"), CHUNKED)
def test_interleaved_is_theirs(pp: int, micro_batches: int, virtual_stages: int) -> None:
    ours = build_schedule("interleaved", pp=pp, micro_batches=micro_batches, virtual_stages=virtual_stages)
    assert orders(ours) == of_chunks(theirs.ScheduleInterleaved1F1B, pp, micro_batches, virtual_stages)


@pytest.mark.parametrize(("pp", "micro_batches", "virtual_stages"), [*CHUNKED, *((*sizes, 1) for sizes in SIZES)])
def test_zero_bubble_is_theirs(pp: int, micro_batches: int, virtual_stages: int) -> None:
    """But for the first stage, whose two halves of a backward pass are one here."""
    ours = build_schedule("zb-h1", pp=pp, micro_batches=micro_batches, virtual_stages=virtual_stages)
    their = of_chunks(theirs.ScheduleInterleavedZeroBubble, pp, micro_batches, virtual_stages)
    halves = [row for row in their[0] if row.stage_index == 0 and row.computation_type != KINDS[Forward]]
    kinds = [KINDS[BackwardInput], KINDS[BackwardWeight]]
    assert [(one.computation_type, one.microbatch_index) for one in halves] == [
        (kind, micro_batch) for micro_batch in range(micro_batches) for kind in kinds
    ]
    their[0] = [
        one._replace(computation_type=KINDS[Backward]) if one in halves else one
        for one in their[0]
        if not (one in halves and one.computation_type == kinds[1])
    ]
    assert orders(ours) == their


@settings(deadline=None, max_examples=60)
@given(schedules())
def test_their_validator_accepts_ours(schedule: Schedule) -> None:
    found = theirs._validate_schedule(orders(schedule), schedule.pp, schedule.num_stages, schedule.micro_batches)
    assert found == {stage: schedule.place(stage)[0] for stage in range(schedule.num_stages)}


@settings(deadline=None, max_examples=30)
@given(schedules())
def test_their_simulator_ends_with_our_messages(schedule: Schedule) -> None:
    streams = {
        rank: in_their_terms(schedule, rank, actions(schedule, rank, lookahead=0)) for rank in range(schedule.pp)
    }
    compute_and_messages = theirs._simulate_comms_compute(
        streams, lambda stage: schedule.place(stage)[0], schedule.num_stages
    )
    assert {rank: [one for one in row if one is not None] for rank, row in compute_and_messages.items()} == streams
