"""Lowering of a schedule to a rank's instruction stream: where each message is sent and where its receive is posted.

A channel is a source rank, its target rank, and a kind, activations or gradients. Each channel has a communicator or tag of
its own, so messages are matched by their order alone: receives are posted in the order of the sends.
"""

from __future__ import annotations

from toolkit.pipeline_schedule.instructions import (
    Backward,
    BackwardInput,
    Compute,
    Forward,
    Instruction,
    Message,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from toolkit.pipeline_schedule.schedule import Schedule

# A receive is posted this many compute instructions before its use, so that the message travels while they run. In
# simulation a larger number gains nothing, with any schedule. The inner ranks of 1F1B still wait for some messages, which are
# needed as soon as they are sent. The other schedules hide all messages shorter than a pass, except in filling and draining.
LOOKAHEAD = 1


def actions(schedule: Schedule, rank: int, *, lookahead: int = LOOKAHEAD) -> tuple[Instruction, ...]:
    """Return the instruction stream of one rank: its compute instructions with sends and receives in between.

    A compute instruction waits for the receive of its own chunk and micro-batch, if one was posted. Sends follow the
    compute that made what they send. Between two stages on the same rank (pp = 1) there is no message.

    >>> from toolkit.pipeline_schedule import build_schedule
    >>> for action in actions(build_schedule("1f1b", pp=2, micro_batches=2), 0):
    ...     print(action)
    Forward(chunk=0, micro_batch=0)
    SendActivation(chunk=0, micro_batch=0, peer=1)
    ReceiveGradient(chunk=0, micro_batch=0, peer=1)
    Forward(chunk=0, micro_batch=1)
    SendActivation(chunk=0, micro_batch=1, peer=1)
    ReceiveGradient(chunk=0, micro_batch=1, peer=1)
    Backward(chunk=0, micro_batch=0)
    Backward(chunk=0, micro_batch=1)

    Args:
        schedule: Any schedule, even one that would deadlock: `simulate` checks that.
        rank: Pipeline rank.
        lookahead: A receive is posted at least this many compute instructions before its use; 0 posts it right before.
            Each costs a buffer of one hidden state.
    """
    order = schedule.order[rank]
    posted: list[list[Message]] = [[] for _ in order]
    for position, receive in _receives(schedule, rank, lookahead):
        posted[position].append(receive)
    stream: list[Instruction] = []
    for receives, instruction in zip(posted, order, strict=True):
        stream += [*receives, instruction]
        if (send := sent_after(schedule, rank, instruction)) is not None:
            stream.append(send)
    return tuple(stream)


def evaluation_actions(schedule: Schedule, rank: int, *, batches: int = 1) -> tuple[Instruction, ...]:
    """Return the instruction stream of one rank in an evaluation: each batch through all its chunks, forward alone.

    Args:
        schedule: Schedule with the places of the stages; its order is not read.
        rank: Pipeline rank.
        batches: Batches, one after the other.
    """
    stream: list[Instruction] = []
    for batch in range(batches):
        for chunk in range(schedule.virtual_stages):
            forward = Forward(chunk=chunk, micro_batch=batch)
            receive, send = received_before(schedule, rank, forward), sent_after(schedule, rank, forward)
            stream += [step for step in (receive, forward, send) if step is not None]
    return tuple(stream)


def sent_after(schedule: Schedule, rank: int, instruction: Compute) -> Message | None:
    """Return the message that a rank sends after a compute instruction, or None."""
    chunk, micro_batch = instruction.chunk, instruction.micro_batch
    stage = schedule.stage(rank, chunk)
    if isinstance(instruction, Forward) and _is_elsewhere(schedule, rank, stage + 1):
        return SendActivation(chunk=chunk, micro_batch=micro_batch, peer=schedule.place(stage + 1)[0])
    if isinstance(instruction, Backward | BackwardInput) and _is_elsewhere(schedule, rank, stage - 1):
        return SendGradient(chunk=chunk, micro_batch=micro_batch, peer=schedule.place(stage - 1)[0])
    return None


def received_before(schedule: Schedule, rank: int, instruction: Compute) -> Message | None:
    """Return the message that a compute instruction needs from another rank, or None."""
    chunk, micro_batch = instruction.chunk, instruction.micro_batch
    stage = schedule.stage(rank, chunk)
    if isinstance(instruction, Forward) and _is_elsewhere(schedule, rank, stage - 1):
        return ReceiveActivation(chunk=chunk, micro_batch=micro_batch, peer=schedule.place(stage - 1)[0])
    if isinstance(instruction, Backward | BackwardInput) and _is_elsewhere(schedule, rank, stage + 1):
        return ReceiveGradient(chunk=chunk, micro_batch=micro_batch, peer=schedule.place(stage + 1)[0])
    return None


def counterpart(schedule: Schedule, rank: int, message: Message) -> Message:
    """Return the peer's instruction for the other end of a message."""
    stage = schedule.stage(rank, message.chunk)
    towards_last = isinstance(message, SendActivation | ReceiveGradient)
    other = {
        SendActivation: ReceiveActivation,
        ReceiveActivation: SendActivation,
        SendGradient: ReceiveGradient,
        ReceiveGradient: SendGradient,
    }[type(message)]
    chunk = schedule.place(stage + 1 if towards_last else stage - 1)[1]
    return other(chunk=chunk, micro_batch=message.micro_batch, peer=rank)


def _is_elsewhere(schedule: Schedule, rank: int, stage: int) -> bool:
    return 0 <= stage < schedule.num_stages and schedule.place(stage)[0] != rank


def _receives(schedule: Schedule, rank: int, lookahead: int) -> list[tuple[int, Message]]:
    """Return each receive of a rank with the index of the compute instruction it is posted before, in posting order."""
    needed = {}
    for position, instruction in enumerate(schedule.order[rank]):
        if (receive := received_before(schedule, rank, instruction)) is not None:
            needed[receive] = max(0, position - lookahead)
    found: list[tuple[int, Message]] = []
    for kind in (ReceiveActivation, ReceiveGradient):
        for peer in sorted({receive.peer for receive in needed if isinstance(receive, kind)}):
            channel = [
                receive
                for instruction in schedule.order[peer]
                if (send := sent_after(schedule, peer, instruction)) is not None and send.peer == rank
                if isinstance(receive := counterpart(schedule, peer, send), kind) and receive in needed
            ]
            latest = len(schedule.order[rank])
            backwards = []
            for receive in reversed(channel):
                # Receives are posted in the order of the sends, even if one is needed later.
                latest = min(latest, needed[receive])
                backwards.append((latest, receive))
            found += reversed(backwards)
    # A receive without a send is posted all the same, so that the simulation reports it.
    listed = {receive for _, receive in found}
    return found + [(position, receive) for receive, position in needed.items() if receive not in listed]
