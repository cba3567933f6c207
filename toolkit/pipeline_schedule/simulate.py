"""Simulation of the instruction streams of all ranks: proves that they end, and times each instruction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from toolkit.errors import PlanError
from toolkit.pipeline_schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    Message,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from toolkit.pipeline_schedule.lowering import actions, counterpart, received_before, sent_after
from toolkit.pipeline_schedule.schedule import Schedule

# Source rank, target rank, class of the receives.
_Channel: TypeAlias = tuple[int, int, type[Message]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """How long a stage takes for one micro-batch, in any one unit of time.

    Args:
        forward: Time of the forward pass.
        backward_input: Time of the input gradient.
        backward_weight: Time of the weight gradients; a whole backward pass takes both.
        transfer: Time of one message from this stage, in either direction.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0

    def of(self, instruction: Compute) -> float:
        """Return the duration of a compute instruction."""
        if isinstance(instruction, Forward):
            return self.forward
        if isinstance(instruction, BackwardInput):
            return self.backward_input
        if isinstance(instruction, BackwardWeight):
            return self.backward_weight
        return self.backward_input + self.backward_weight


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A compute instruction of a rank, with its start and end."""

    instruction: Compute
    start: float
    end: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated step.

    Args:
        schedule: Schedule that was simulated.
        spans: Compute instructions of each rank, in order of time. Times are in the unit of the durations, from 0.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """Time at which the last rank ends."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    def busy(self, rank: int) -> float:
        """Return how long a rank computes."""
        return sum(span.end - span.start for span in self.spans[rank])

    def bubble_fraction_of(self, rank: int) -> float:
        """Return the share of the makespan in which a rank idles."""
        return 1.0 - self.busy(rank) / self.makespan if self.makespan else 0.0

    @property
    def bubble_fraction(self) -> float:
        """Share of the time of all ranks in which they idle."""
        return sum(map(self.bubble_fraction_of, range(self.schedule.pp))) / self.schedule.pp


def simulate(
    schedule: Schedule,
    durations: Durations | Sequence[Durations] | None = None,
    *,
    streams: Sequence[Sequence[Instruction]] | None = None,
    under_way: int | None = None,
) -> Timeline:
    """Simulate a step under the rules of the real one.

    Sends and receives take a rank no time. A message starts once it is sent, its receive is posted and the one before it
    on its channel has arrived. Compute waits for its message.

    Args:
        schedule: Schedule to simulate.
        durations: Durations of all stages alike, or one for each stage; if None, 1 each for the forward pass and the two
            halves of the backward pass.
        streams: Instructions of each rank; `actions` of the schedule if None.
        under_way: Largest number of a rank's messages in flight when it continues after a send, as in `P2PChannels.send`;
            any number if None.

    Raises:
        PlanError: SCHEDULE_INVALID, if an instruction is missing, done twice or done too early, or a message lacks its
            counterpart or is sent in another order than it is received; SCHEDULE_DEADLOCK, if ranks wait for each other.
    """
    given = Durations() if durations is None else durations
    each = [given] * schedule.num_stages if isinstance(given, Durations) else list(given)
    if len(each) != schedule.num_stages:
        raise ValueError(f"{len(each)} durations are given for {schedule.num_stages} stages")
    if streams is None:
        streams = [actions(schedule, rank) for rank in range(schedule.pp)]
    if len(streams) != schedule.pp:
        raise ValueError(f"{len(streams)} streams are given for {schedule.pp} ranks")
    channels: dict[_Channel, _Traffic] = {}
    ranks = [
        _Rank(schedule=schedule, rank=rank, stream=stream, durations=each, channels=channels, under_way=under_way)
        for rank, stream in enumerate(streams)
    ]
    # Running ranks one after the other is enough: no rank depends on how far another one has run ahead.
    while sum(rank.advance() for rank in ranks):
        pass
    # Checked first, since other ranks may wait for a missing instruction.
    for rank in ranks:
        rank.check_complete()
    if any(not rank.is_done for rank in ranks):
        raise _deadlock(ranks)
    return Timeline(schedule=schedule, spans=tuple(tuple(rank.spans) for rank in ranks))


@dataclass(slots=True, kw_only=True)
class _Traffic:
    """Messages of one channel so far: the sends and the posted receives with their times, and the arrivals."""

    sent: list[tuple[Message, float]] = field(default_factory=list)
    posted: list[tuple[Message, float]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Rank:
    """One simulated rank."""

    schedule: Schedule
    rank: int
    stream: Sequence[Instruction]
    durations: Sequence[Durations]
    channels: dict[_Channel, _Traffic]
    under_way: int | None = None
    position: int = 0
    clock: float = 0.0
    spans: list[Span] = field(default_factory=list)
    done: dict[Compute, float] = field(default_factory=dict)
    sent: dict[Message, tuple[_Traffic, int]] = field(default_factory=dict)
    received: dict[Message, int] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return self.position == len(self.stream)

    @property
    def current(self) -> Instruction:
        return self.stream[self.position]

    def advance(self) -> bool:
        """Execute until the rank waits or ends, and return whether it made progress."""
        before = self.position
        while not self.is_done and self._have_arrived() and self._execute(self.current):
            self.position += 1
        return self.position > before

    def check_complete(self) -> None:
        """Check that a finished rank ran each micro-batch through each chunk, forward and backward."""
        if not self.is_done:
            return
        for chunk in range(self.schedule.virtual_stages):
            for micro_batch in range(self.schedule.micro_batches):
                place: dict[str, Any] = {"chunk": chunk, "micro_batch": micro_batch}
                if Forward(**place) not in self.done:
                    raise _invalid(self.rank, Forward(**place), "it is missing")
                if Backward(**place) not in self.done and BackwardWeight(**place) not in self.done:
                    missing = BackwardWeight if BackwardInput(**place) in self.done else Backward
                    raise _invalid(self.rank, missing(**place), "it is missing")
        if unused := set(self.received) - {received_before(self.schedule, self.rank, done) for done in self.done}:
            raise _invalid(self.rank, min(unused, key=str), "nothing uses what it receives")

    def _execute(self, instruction: Instruction) -> bool:
        if isinstance(instruction, Compute):
            return self._compute(instruction)
        if isinstance(instruction, SendActivation | SendGradient):
            self._send(instruction)
        elif isinstance(instruction, ReceiveActivation | ReceiveGradient):
            self._post(instruction)
        else:
            raise _invalid(self.rank, instruction, "it is neither compute nor a message")
        return True

    def _send(self, send: SendActivation | SendGradient) -> None:
        if send not in {sent_after(self.schedule, self.rank, done) for done in self._makers(send)}:
            raise _invalid(self.rank, send, "what it sends has not been computed, or is not for that rank")
        if send in self.sent:
            raise _invalid(self.rank, send, "it is sent twice")
        receive = counterpart(self.schedule, self.rank, send)
        traffic = self._traffic(self.rank, send.peer, type(receive))
        self.sent[send] = traffic, len(traffic.sent)
        traffic.sent.append((send, self.clock))

    def _makers(self, send: Message) -> list[Compute]:
        place: dict[str, Any] = {"chunk": send.chunk, "micro_batch": send.micro_batch}
        makers: tuple[type[Compute], ...] = (
            (Forward,) if isinstance(send, SendActivation) else (Backward, BackwardInput)
        )
        return [maker(**place) for maker in makers if maker(**place) in self.done]

    def _post(self, receive: ReceiveActivation | ReceiveGradient) -> None:
        if receive in self.received:
            raise _invalid(self.rank, receive, "it is posted twice")
        traffic = self._traffic(receive.peer, self.rank, type(receive))
        self.received[receive] = len(traffic.posted)
        traffic.posted.append((receive, self.clock))

    def _compute(self, instruction: Compute) -> bool:
        self._check_order(instruction)
        start = self.clock
        if (needed := received_before(self.schedule, self.rank, instruction)) is not None:
            if needed not in self.received:
                raise _invalid(self.rank, instruction, f"{needed} was not posted before it")
            arrival = self._arrival(needed)
            if arrival is None:
                return False
            start = max(start, arrival)
        duration = self.durations[self.schedule.stage(self.rank, instruction.chunk)].of(instruction)
        self.clock = start + duration
        self.done[instruction] = self.clock
        self.spans.append(Span(instruction=instruction, start=start, end=self.clock))
        return True

    def _check_order(self, instruction: Compute) -> None:
        """Check the order within a rank: nothing twice, forward before backward, and its own stages in sequence."""
        chunk, micro_batch = instruction.chunk, instruction.micro_batch
        if not (0 <= chunk < self.schedule.virtual_stages and 0 <= micro_batch < self.schedule.micro_batches):
            raise _invalid(self.rank, instruction, "there is no such chunk or micro-batch")
        place: dict[str, Any] = {"chunk": chunk, "micro_batch": micro_batch}
        whole, first, second = Backward(**place), BackwardInput(**place), BackwardWeight(**place)
        if isinstance(instruction, Forward):
            same: tuple[Compute, ...] = (instruction,)
        else:
            same = (whole, first, second) if instruction == whole else (whole, instruction)
        if any(one in self.done for one in same):
            raise _invalid(self.rank, instruction, "it is done twice")
        for earlier in self._before(instruction):
            if not any(one in self.done for one in earlier):
                raise _invalid(self.rank, instruction, f"{earlier[0]} does not precede it")

    def _before(self, instruction: Compute) -> list[list[Compute]]:
        """Return the instructions that this rank must have executed before: one of each list."""
        chunk, micro_batch = instruction.chunk, instruction.micro_batch
        if isinstance(instruction, BackwardWeight):
            return [[BackwardInput(chunk=chunk, micro_batch=micro_batch)]]
        is_forward = isinstance(instruction, Forward)
        needed: list[list[Compute]] = [] if is_forward else [[Forward(chunk=chunk, micro_batch=micro_batch)]]
        neighbour = self.schedule.stage(self.rank, chunk) + (-1 if is_forward else 1)
        if 0 <= neighbour < self.schedule.num_stages:
            rank, other = self.schedule.place(neighbour)
            place: dict[str, Any] = {"chunk": other, "micro_batch": micro_batch}
            if rank == self.rank:
                needed.append([Forward(**place)] if is_forward else [Backward(**place), BackwardInput(**place)])
        return needed

    def _arrival(self, receive: Message) -> float | None:
        """Return when a posted message arrives, or None while that is not known."""
        traffic = self._traffic(receive.peer, self.rank, type(receive))
        return self._arrival_of(traffic, self.received[receive], source=receive.peer)

    def _have_arrived(self) -> bool:
        """Return whether the arrival of all sends beyond those allowed in flight is known; the rank waits for these."""
        if self.under_way is None or len(self.sent) <= self.under_way:
            return True
        arrival = self._arrival_of(*list(self.sent.values())[-self.under_way - 1], source=self.rank)
        if arrival is None:
            return False
        self.clock = max(self.clock, arrival)
        return True

    def _arrival_of(self, traffic: _Traffic, number: int, *, source: int) -> float | None:
        while len(traffic.arrivals) <= number:
            next_one = len(traffic.arrivals)
            if next_one >= min(len(traffic.sent), len(traffic.posted)):
                return None
            (send, sent), (posted, since) = traffic.sent[next_one], traffic.posted[next_one]
            if counterpart(self.schedule, source, send) != posted:
                raise _invalid(
                    send.peer, posted, f"rank {source} sends {send} at its place: the orders of a channel differ"
                )
            free = traffic.arrivals[-1] if traffic.arrivals else 0.0
            transfer = self.durations[self.schedule.stage(source, send.chunk)].transfer
            traffic.arrivals.append(max(sent, since, free) + transfer)
        return traffic.arrivals[number]

    def _traffic(self, source: int, target: int, kind: type[Message]) -> _Traffic:
        return self.channels.setdefault((source, target, kind), _Traffic())


def _invalid(rank: int, instruction: Instruction, why: str) -> PlanError:
    return PlanError.of(
        code="SCHEDULE_INVALID",
        key="parallel.pipeline_schedule",
        message=f"rank {rank}, {instruction}: {why}",
        fix="Correct the order of the schedule; those of build_schedule are valid",
    )


def _deadlock(ranks: Sequence[_Rank]) -> PlanError:
    waiting = []
    for rank in ranks:
        if rank.is_done:
            continue
        needed = received_before(rank.schedule, rank.rank, rank.current) if isinstance(rank.current, Compute) else None
        awaited = (
            "" if needed is None else f" for {counterpart(rank.schedule, rank.rank, needed)} of rank {needed.peer}"
        )
        waiting.append(f"rank {rank.rank} waits at {rank.current}{awaited}")
    return PlanError.of(
        code="SCHEDULE_DEADLOCK",
        key="parallel.pipeline_schedule",
        message=f"the schedule never ends: {'; '.join(waiting)}",
        fix="Correct the order of the schedule; those of build_schedule are valid",
    )
