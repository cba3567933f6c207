"""Replays a traced pass under an engine: two optimizer steps, so that what a step leaves behind meets the next pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from toolkit.memory.account import Account, in_blocks
from toolkit.memory.engines.settings import EngineSettings
from toolkit.memory.events import Placed, Run
from toolkit.memory.trace import Parameter, Trace

# Steps after which nothing new appears: states made lazily by the first are there in the second.
NUM_STEPS = 2
# Micro-batches that differ: the first of a step, one between, the last.
MAX_MICRO_STEPS = 3
# get_norm_dtype() is float64 on CUDA (deepspeed runtime/utils.py).
NORM_ITEMSIZE = 8


class Replay(ABC):
    """An engine as far as memory goes.

    Args:
        trace: One micro-batch of the model.
        settings: What the engine's memory depends on.
        workspace_bytes: cuBLAS workspace of one thread.
        rank: Data-parallel rank.
    """

    def __init__(self, trace: Trace, settings: EngineSettings, *, workspace_bytes: int, rank: int = 0) -> None:
        self.trace = trace
        self.settings = settings
        self.rank = rank
        self.account = Account()
        self.trainable = [parameter for parameter in trace.parameters if parameter.trainable]
        self.num_trainable = sum(parameter.numel for parameter in self.trainable)
        self.largest_numel = max((parameter.numel for parameter in self.trainable), default=0)
        self.gradients_bytes = sum(in_blocks(parameter.size) for parameter in self.trainable)
        self.by_name = {parameter.name: parameter for parameter in trace.parameters}
        self._workspace_bytes = workspace_bytes

    def run(self) -> Account:
        """Replays initialization and two steps."""
        self.account.enter("init")
        self.account.allocate("model buffers", self.trace.buffers_bytes)
        self.initialize()
        micro_steps = min(self.settings.accumulation_steps, MAX_MICRO_STEPS)
        for step in range(NUM_STEPS):
            for micro in range(micro_steps):
                self._pass(first=micro == 0, last=micro == micro_steps - 1, cold=step == 0 and micro == 0)
            self.account.enter("step")
            self.step()
            self._replay(self.trace.after)
        self.account.enter("save")
        self.save()
        return self.account

    def _pass(self, *, first: bool, last: bool, cold: bool) -> None:
        self.account.enter("forward")
        if cold:
            # CublasHandlePool.cpp getChosenWorkspaceSize: one for each thread that multiplies, kept for good.
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

    def _replay(self, events: Sequence[Placed]) -> None:
        apply, account = self.account.apply, self.account
        for placed in events:
            event = placed.event
            if isinstance(event, Run):
                apply(event)
            elif event.kind == "gradient":
                account.allocate("gradients", event.size)
                self.gradient(self.by_name[placed.name], event.size)
            else:
                self.module(placed.name, fetch=event.kind == "fetch", backward=event.backward)

    def keep_gradient(self, size: int) -> None:
        """Keeps a gradient that has just been allocated; where all are kept already, it was added to its own in place."""
        if self.account.held("gradients") > self.gradients_bytes:
            self.account.free("gradients", size)

    def run_optimizer(self, numel: int, *, itemsize: int = 4) -> None:
        """Steps `numel` elements of `itemsize` bytes: the first step makes their moments, which have that type, too."""
        settings = self.settings
        moments = settings.state_bytes if settings.optimizer == "adamw_8bit" else settings.state_bytes * itemsize / 4
        if not self.account.held("optimizer state"):
            self.account.allocate("optimizer state", moments * numel)
        self.account.spike("optimizer temporaries", settings.step_bytes * itemsize / 4 * numel)

    @abstractmethod
    def initialize(self) -> None:
        """From the first parameter to the engine."""

    def begin_forward(self) -> None:  # noqa: B027 - most engines do nothing here
        """Before the forward pass."""

    def begin_backward(self, *, first: bool, last: bool) -> None:  # noqa: B027 - most engines do nothing here
        """Before the backward pass of the first, a middle or the last micro-batch."""

    @abstractmethod
    def gradient(self, parameter: Parameter, size: int) -> None:
        """A whole gradient of `size` bytes has just been allocated under the cause `gradients`."""

    def module(self, name: str, *, fetch: bool, backward: bool) -> None:  # noqa: B027 - most engines do nothing here
        """A module's hook of ZeRO-3 fires."""

    @abstractmethod
    def end_backward(self, *, first: bool, last: bool) -> None:
        """After the last gradient."""

    @abstractmethod
    def step(self) -> None:
        """The optimizer step."""

    def save(self) -> None:  # noqa: B027 - most engines do nothing here
        """A checkpoint: DeepSpeed copies tensors to the host one at a time, and needs nothing of the device."""
