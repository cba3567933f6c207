"""Replay of a traced pass under an engine, for two optimizer steps: what the first leaves is there in the second."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatchmethod

from toolkit.memory.engines.filling import EMBEDDINGS_AND_HEADS, FP32_ITEMSIZE, decomposed_bytes, errors_bytes
from toolkit.memory.engines.ledger import MemoryLedger
from toolkit.memory.engines.settings import EngineSettings
from toolkit.memory.engines.step_program import StepProgram
from toolkit.memory.trace.attribution import LOSS, MODEL, RECEIVED, SENT
from toolkit.memory.trace.events import MemoryTrace, Parameter, ResolvedEvent, Run, in_blocks, join
from toolkit.pipeline_schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from toolkit.topology.communicators import MAX_SENDS_IN_FLIGHT

# Steps after which nothing new appears: states that the first makes lazily exist in the second.
NUM_STEPS = 2
# Micro-batches that differ: the first of a step, one between, the last.
MAX_MICRO_STEPS = 3
# get_norm_dtype() is float64 on CUDA (deepspeed runtime/utils.py).
NORM_ITEMSIZE = 8


@dataclass(slots=True, kw_only=True)
class _Sent:
    """A message that may still be in flight: the bytes that it alone holds, and the chunk and micro-batch of its output."""

    size: int
    activation: tuple[int, int] | None = None


class EngineReplay(ABC):
    """The memory behaviour of an engine.

    Args:
        trace: Trace of one micro-batch of the model.
        settings: Settings that the engine's memory depends on.
        workspace_bytes: cuBLAS workspace of one thread.
        rank: Data-parallel rank.
        course: Step program of a pipeline's rank; None without stages.
    """

    def __init__(
        self,
        trace: MemoryTrace,
        settings: EngineSettings,
        *,
        workspace_bytes: int,
        rank: int = 0,
        course: StepProgram | None = None,
    ) -> None:
        self.trace = trace
        self.settings = settings
        self.rank = rank
        self.course = course
        self.account = MemoryLedger()
        self.trainable = [parameter for parameter in trace.parameters if parameter.trainable]
        self.num_trainable = sum(parameter.numel for parameter in self.trainable)
        self.largest_numel = max((parameter.numel for parameter in self.trainable), default=0)
        self.gradients_bytes = sum(in_blocks(parameter.size) for parameter in self.trainable)
        self.by_name = {parameter.name: parameter for parameter in trace.parameters}
        self._workspace_bytes = workspace_bytes
        self._joined: dict[int, Sequence[ResolvedEvent]] = {}  # the trace keeps the events alive
        self._added: dict[int, tuple[set[str], Sequence[ResolvedEvent]]] = {}
        self._accumulated: set[str] = set()
        self._reduced = False  # whether a backward pass of this step has left its gradients in partitions
        self._sent: deque[_Sent] = deque()

    def run(self) -> MemoryLedger:
        """Replay initialization and two steps."""
        self.account.enter("init")
        self.account.allocate("model buffers", self.trace.buffers_bytes)
        self.initialize()
        if self.settings.decomposes:
            self.account.transient("singular vectors", decomposed_bytes(self.trace.parameters))
        if self.settings.keeps_errors:
            self.account.transient("errors of rounding", errors_bytes(self.trainable, itemsize=self.settings.itemsize))
        micro_steps = min(self.settings.accumulation_steps, MAX_MICRO_STEPS)
        for step in range(NUM_STEPS):
            if self.course is not None:
                self._follow(self.course, cold=step == 0)
            for micro in range(micro_steps if self.course is None else 0):
                self._pass(first=micro == 0, last=micro == micro_steps - 1, cold=step == 0 and micro == 0)
            if self.settings.frees_graph:
                self._replay(self.trace.after)
            self.account.enter("step")
            self.step()
            if not self.settings.frees_graph:
                self._replay(self.trace.after)
            if self.course is not None:
                self._end_course(self.course)
        self.account.enter("save")
        self.save()
        return self.account

    def _pass(self, *, first: bool, last: bool, cold: bool) -> None:
        self.account.enter("forward")
        if cold:
            # CublasHandlePool.cpp getChosenWorkspaceSize: one for each thread that multiplies, never freed.
            self.account.allocate("cuBLAS workspaces", self._workspace_bytes)
        self.begin_forward()
        self._replay(self.trace.forward)
        self.account.enter("backward")
        if cold:
            self.account.allocate("cuBLAS workspaces", self._workspace_bytes)
        self.begin_backward(first=first, last=last)
        self._replay(self.trace.backward)
        self.end_backward(first=first, last=last)
        if not last:
            self.account.enter("step")  # engine.step() is called after each micro-batch, and does nothing yet
            self._replay(self.trace.after)

    def _read(self, events: Sequence[ResolvedEvent]) -> Sequence[ResolvedEvent]:
        """Return events without marks that the engine does not act on, and with what then is one run as one."""
        if type(self).module is not EngineReplay.module:
            return events
        if id(events) not in self._joined:
            marks = (placed for placed in events if isinstance(placed.event, Run) or placed.event.kind == "gradient")
            self._joined[id(events)] = join(marks)
        return self._joined[id(events)]

    def _adding(self, events: Sequence[ResolvedEvent]) -> Sequence[ResolvedEvent]:
        """Return a pass of a pipeline as one run if the step keeps all its gradients until the end, and has them already.

        Most micro-batches of a step are such passes: each gradient is added to the one that is there, and freed.
        """
        if self.course is None or not self.course.reduces_once or type(self).module is not EngineReplay.module:
            return self._read(events)
        if id(events) not in self._added:
            names: set[str] = set()
            runs: list[ResolvedEvent] = []
            for placed in self._read(events):
                if isinstance(placed.event, Run):
                    runs.append(placed)
                    continue
                size = in_blocks(placed.event.size)
                names.add(placed.name)
                runs.append(ResolvedEvent(Run(size, (("gradients", size),), ())))
            self._added[id(events)] = names, join(runs)
        needed, joined = self._added[id(events)]
        return joined if needed <= self._accumulated else self._read(events)

    def _replay(self, events: Sequence[ResolvedEvent]) -> None:
        apply, account = self.account.apply, self.account
        for placed in self._adding(events):
            event = placed.event
            if isinstance(event, Run):
                apply(event)
            elif event.kind == "gradient":
                account.allocate("gradients", event.size)
                if self.course is not None and (self.course.reduces_once or placed.name == self.trace.shared):
                    self._accumulate(self.by_name[placed.name], event.size, self.course)
                else:
                    self.gradient(self.by_name[placed.name], event.size)
            else:
                self.module(placed.name, fetch=event.kind == "fetch", backward=event.backward)

    def _follow(self, course: StepProgram, *, cold: bool) -> None:
        """Run the passes of a pipeline's step, and what is deferred to its end (engine/grad_reduction.py)."""
        account, threads = self.account, {"forward", "backward"} if cold else set()
        account.enter("forward")
        account.allocate(MODEL, course.num_micro_batches * self.trace.chunks[0].batch_bytes)
        account.allocate(LOSS, self._unseen_losses(course))
        for action, following in zip(course.actions, course.following_phases(), strict=True):
            if isinstance(action, Forward | Backward | BackwardInput) and account.phase in threads:
                threads.remove(account.phase)
                account.allocate("cuBLAS workspaces", self._workspace_bytes)
            self._act(action)
            if following != account.phase:
                account.enter(following)
            if isinstance(action, Backward | BackwardInput) or (
                isinstance(action, Forward) and not self.trace.chunks[action.chunk].backward
            ):
                self._free_micro_batch(action)
        self._sent_until(0)
        self._cast_fp32_sums(course)
        if course.reduces_once:
            if self._accumulated:
                self.reduce()
        else:
            self._reduce_shared()
            if self._reduced:
                self.finish_reduction()
        self._accumulated.clear()
        self._reduced = False

    @singledispatchmethod
    def _act(self, action: Instruction) -> None:
        raise TypeError(f"{type(action).__name__} is not an instruction of the engine")

    @_act.register
    def _receive_activation(self, action: ReceiveActivation) -> None:
        self.account.allocate(RECEIVED, self.trace.chunks[action.chunk].received_bytes)

    @_act.register
    def _receive_gradient(self, action: ReceiveGradient) -> None:
        self.account.allocate(RECEIVED, self.trace.chunks[action.chunk].gradient_bytes)

    @_act.register
    def _do_forward(self, action: Forward) -> None:
        chunk = self.trace.chunks[action.chunk]
        self.begin_forward()
        self._replay(chunk.forward)
        self.account.allocate(LOSS, chunk.reported_bytes)
        if not chunk.backward:  # an evaluation sends its output
            self.account.allocate(SENT, chunk.sent_bytes)

    @_act.register
    def _do_backward(self, action: Backward) -> None:
        self._do_backward_input(action)

    @_act.register
    def _do_first_half(self, action: BackwardInput) -> None:
        self._do_backward_input(action)

    @_act.register
    def _do_second_half(self, action: BackwardWeight) -> None:
        chunk = self.trace.chunks[action.chunk]
        self._replay(chunk.weights)
        if chunk.keeps_received:
            self.account.free(RECEIVED, chunk.received_bytes)

    def _do_backward_input(self, action: Backward | BackwardInput) -> None:
        chunk = self.trace.chunks[action.chunk]
        assert self.course is not None, "there are chunks"
        if self.course.reduces_once:
            self.begin_backward(first=True, last=True)
            self._replay(chunk.backward)
        else:
            self.begin_backward(first=not self._reduced, last=False)
            self._replay(chunk.backward)
            self.end_backward(first=not self._reduced, last=False)
            self._reduced = True
        self.account.allocate(SENT, chunk.sent_bytes)

    def _free_micro_batch(self, action: Forward | Backward | BackwardInput) -> None:
        """Free the tensors of a micro-batch after its last pass through a chunk, except those in flight."""
        chunk = self.trace.chunks[action.chunk]
        self._replay(chunk.after)
        if not chunk.keeps_received:
            self.account.free(RECEIVED, chunk.received_bytes)
        self.account.free(RECEIVED, chunk.gradient_bytes)
        for sent in self._sent:
            if sent.activation == (action.chunk, action.micro_batch) and chunk.backward:
                sent.size = chunk.gradient_bytes  # as large as the activation of which it is the gradient
                self.account.allocate(SENT, sent.size)

    @_act.register
    def _send_activation(self, action: SendActivation) -> None:
        """Send an activation, which the stage keeps until its backward pass; without one only the message holds it."""
        chunk = self.trace.chunks[action.chunk]
        size = 0 if chunk.backward else chunk.sent_bytes
        self._sent.append(_Sent(size=size, activation=(action.chunk, action.micro_batch)))
        self._sent_until(MAX_SENDS_IN_FLIGHT)

    @_act.register
    def _send_gradient(self, action: SendGradient) -> None:
        self._sent.append(_Sent(size=self.trace.chunks[action.chunk].sent_bytes))
        self._sent_until(MAX_SENDS_IN_FLIGHT)

    def _sent_until(self, count: int) -> None:
        """Free what has been sent, except the last `count` messages."""
        while len(self._sent) > count:
            self.account.free(SENT, self._sent.popleft().size)

    def _accumulate(self, parameter: Parameter, size: int, course: StepProgram) -> None:
        """Keep a gradient until the end of the step; those of later micro-batches are added to it in place."""
        if parameter.name in self._accumulated:
            self.account.free("gradients", size)
            return
        self._accumulated.add(parameter.name)
        if course.sums_in_fp32 and parameter.itemsize < FP32_ITEMSIZE:
            self.account.allocate("gradient sums in fp32", FP32_ITEMSIZE * parameter.numel)
            if self.settings.zero_stage < 3:  # a partitioned parameter cannot be assigned another gradient
                self.account.free("gradients", size)

    def _cast_fp32_sums(self, course: StepProgram) -> None:
        """Round the fp32 sums to gradients, one after the other."""
        for parameter in self.trainable:
            if course.sums_in_fp32 and parameter.itemsize < FP32_ITEMSIZE and parameter.name in self._accumulated:
                if self.settings.zero_stage < 3:
                    self.account.allocate("gradients", parameter.size)
                self.account.free("gradient sums in fp32", FP32_ITEMSIZE * parameter.numel)

    def _reduce_shared(self) -> None:
        """Reduce the gradient that both ends of the pipeline have summed, as those of a backward pass are reduced."""
        if self.trace.shared not in self._accumulated:
            return
        parameter = self.by_name[self.trace.shared]
        self.begin_backward(first=False, last=False)
        self.gradient(parameter, in_blocks(parameter.size))
        self.end_backward(first=False, last=False)

    def _unseen_losses(self, course: StepProgram) -> int:
        """Return the bytes of the losses of the micro-batches that are not replayed."""
        followed = sum(isinstance(action, Forward) and action.chunk == 0 for action in course.actions)
        return max(0, course.num_micro_batches - followed) * sum(chunk.reported_bytes for chunk in self.trace.chunks)

    def _end_course(self, course: StepProgram) -> None:
        """Free the micro-batches and their losses."""
        self.account.free(LOSS, self._unseen_losses(course))
        self.account.free(MODEL, course.num_micro_batches * self.trace.chunks[0].batch_bytes)
        for action in course.actions:
            if isinstance(action, Forward):
                self.account.free(LOSS, self.trace.chunks[action.chunk].reported_bytes)

    def keep_gradient(self, size: int) -> None:
        """Keep a gradient that was just allocated; where all are kept already, it was added in place."""
        if self.account.held("gradients") > self.gradients_bytes:
            self.account.free("gradients", size)

    def run_optimizer(self, numel: int, *, itemsize: int = 4) -> None:
        """Step `numel` elements of `itemsize` bytes; the first step makes their moments, of the same type."""
        moments = self._state_bytes() * (1 if self.settings.has_own_type else itemsize / 4)
        if not self.account.held("optimizer state"):
            self.account.allocate("optimizer state", moments * numel)
        self.account.transient("optimizer temporaries", self._step_bytes(numel, itemsize=itemsize))

    def _state_bytes(self) -> float:
        """Return the bytes of optimizer state per element in fp32, by the shapes of the weights where these count."""
        if self.settings.optimizer == "adafactor":
            return 4 * sum(parameter.num_sums for parameter in self.trainable) / self.num_trainable
        if self.settings.optimizer == "muon":
            return 8 - 4 * sum(parameter.numel for parameter in self._orthogonalized()) / self.num_trainable
        return self.settings.state_bytes

    def _step_bytes(self, numel: int, *, itemsize: int) -> float:
        """Return the bytes that a step of `numel` elements takes for a while.

        Source:
            transformers optimization.py Adafactor.step: weight by weight, gradient and weight in fp32, the update, and the product
            of rows and columns. torch optim/_muon.py: weight by weight, the update, its bf16 copies and their squares.
        """
        optimizer = self.settings.optimizer
        if optimizer == "adafactor":
            return (8 if itemsize == FP32_ITEMSIZE else 16) * self.largest_numel
        if optimizer != "muon":
            return self.settings.step_bytes * itemsize / 4 * numel
        return max((p.numel * (itemsize + 6) + 4 * min(p.shape) ** 2 for p in self._orthogonalized()), default=0)

    def _orthogonalized(self) -> list[Parameter]:
        """Return the weights that Muon steps: matrices but those of embedding and head."""
        return [p for p in self.trainable if len(p.shape) == 2 and not p.module.endswith(EMBEDDINGS_AND_HEADS)]

    @abstractmethod
    def initialize(self) -> None:
        """Replay from the first parameter to the finished engine."""

    def begin_forward(self) -> None:  # noqa: B027 - most engines do nothing here
        """Act before the forward pass."""

    def begin_backward(self, *, first: bool, last: bool) -> None:  # noqa: B027 - most engines do nothing here
        """Act before the backward pass of the first, a middle or the last micro-batch."""

    @abstractmethod
    def gradient(self, parameter: Parameter, size: int) -> None:
        """Act on a whole gradient of `size` bytes, which has just been allocated under the cause `gradients`."""

    def reduce(self) -> None:
        """Reduce the gradients that the passes of a pipeline's step have accumulated."""
        raise TypeError(f"pipelines do not run under {type(self).__name__}")

    def finish_reduction(self) -> None:
        """Act after all passes of a pipeline's step have been reduced."""
        raise TypeError(f"pipelines do not run under {type(self).__name__}")

    def module(self, name: str, *, fetch: bool, backward: bool) -> None:  # noqa: B027 - most engines do nothing here
        """Act on a ZeRO-3 hook of a module."""

    @abstractmethod
    def end_backward(self, *, first: bool, last: bool) -> None:
        """Act after the last gradient."""

    @abstractmethod
    def step(self) -> None:
        """Run the optimizer step."""

    def save(self) -> None:  # noqa: B027 - most engines do nothing here
        """Save a checkpoint: DeepSpeed copies tensors to the host one at a time, and allocates nothing on the device."""
