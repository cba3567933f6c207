"""Execution of a pipeline: a rank runs its part of a schedule on the plain DeepSpeed engine.

The toolkit orders the passes and sets the engine's counters to match (grad_reduction.py): any schedule runs with ZeRO-1,
2 and 3, and one engine, one loop and one kind of checkpoint serve every strategy.

B: sequences of a micro-batch, S: tokens of a sequence, D: width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import singledispatchmethod
from typing import Any

import torch

from toolkit.distributed.deepspeed_private import expect_backward
from toolkit.distributed.p2p import MAX_SENDS_IN_FLIGHT, P2PChannels, PendingRecv
from toolkit.distributed.world import World
from toolkit.engine.forward_backward import MicroBatch, step_loss
from toolkit.engine.grad_reduction import reduction
from toolkit.engine.memory_tracker import PhaseMemoryTracker
from toolkit.pipeline_parallel import forward_stage, hidden_dtype, hidden_shape
from toolkit.pipeline_parallel.zero_bubble_backward import run_weight_backward, split_backward
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
    actions,
    evaluation_actions,
)
from toolkit.planning.plan import Plan
from toolkit.tensor_parallel.deferred_grads import DeferredWeightGrad

_Place = tuple[int, int]  # chunk of this rank, micro-batch


class PipelineForwardBackward:
    """One step run by the plan's pipeline schedule.

    Args:
        plan: Resolved plan.
        world: Process groups and place of this rank in a grid with stages.
        engine: The DeepSpeed engine around this rank's stages.
        memory: Tracker that is told when passes end.

    Collectives:
        The ranks of one pipeline create their channels.
    """

    plain_norm: torch.Tensor | None = None
    failed = False  # True while passes run: one that raises leaves messages and gradients

    def __init__(self, plan: Plan, world: World, engine: Any, memory: PhaseMemoryTracker) -> None:
        settings = plan.settings
        self._world, self._engine, self._memory = world, engine, memory
        self.losses = step_loss(plan, world, engine)
        self._schedule = schedule = plan.schedule
        self._actions = actions(schedule, world.coordinate.pp)
        self._evaluation = evaluation_actions(schedule, world.coordinate.pp)
        self._channels = P2PChannels(world.grid, world.rank, device=world.device, wraps=schedule.virtual_stages > 1)
        self._reduction = reduction(plan, world, engine, self._channels)
        self._weight_gradients = split_backward(engine.module) if settings.splits_backward else None
        # An empty tensor with the dtype and device of the activations between stages.
        self._like = torch.empty(0, dtype=hidden_dtype(engine.module), device=world.device)
        self._step = _Step()

    def run(self, micro_batches: Sequence[dict[str, torch.Tensor]], num_targets: torch.Tensor) -> torch.Tensor:
        self.failed = True
        self._step = _Step(micro_batches=micro_batches, num_targets=num_targets)
        total = torch.zeros((), device=self._world.device)
        with self._reduction.step():
            for action in self._actions:
                self._do(action)
            self._channels.finish()
        self._memory.end("backward")
        self._engine.step()
        self._memory.end("step")
        for loss in self._step.losses:
            total += loss
        self._step = _Step()
        self.failed = False
        return total

    def outputs(self, batch: MicroBatch) -> Any:
        """Run one batch through all stages; in a sequence of calls, each rank sends its result and continues without waiting."""
        self.failed, hidden_BSD = True, None
        outputs: Any = None
        for action in self._evaluation:
            if isinstance(action, ReceiveActivation):
                shape = hidden_shape(self._engine.module, batch)
                hidden_BSD = self._channels.receive(shape, "activation", source=action.peer, like=self._like).wait()
            elif isinstance(action, Forward):
                outputs = self._call(action.chunk, batch, hidden_BSD)
            elif isinstance(action, SendActivation):
                self._channels.send(outputs, "activation", to=action.peer)
                self._channels.finish(but=MAX_SENDS_IN_FLIGHT)  # no gradient returns for which this rank would wait
                outputs = None
        self.failed = False
        return outputs

    def _call(self, chunk: int, batch: Mapping[str, torch.Tensor], hidden_BSD: torch.Tensor | None) -> Any:
        return forward_stage(self._engine, self.losses.inputs(batch), chunk=chunk, received=hidden_BSD)

    def _is_last(self, chunk: int) -> bool:
        return self._schedule.stage(self._world.coordinate.pp, chunk) == self._schedule.num_stages - 1

    @singledispatchmethod
    def _do(self, action: Instruction) -> None:
        raise TypeError(f"{type(action).__name__} is no instruction that the engine runs")

    @_do.register
    def _receive_activation(self, action: ReceiveActivation) -> None:
        shape = hidden_shape(self._engine.module, self._step.micro_batches[action.micro_batch])
        self._step.activations[_place(action)] = self._channels.receive(
            shape, "activation", source=action.peer, like=self._like
        )

    @_do.register
    def _receive_gradient(self, action: ReceiveGradient) -> None:
        shape = hidden_shape(self._engine.module, self._step.micro_batches[action.micro_batch])
        self._step.gradients[_place(action)] = self._channels.receive(
            shape, "gradient", source=action.peer, like=self._like
        )

    @_do.register
    def _forward(self, action: Forward) -> None:
        step, place = self._step, _place(action)
        batch = step.micro_batches[action.micro_batch]
        arrival = step.activations.pop(place, None)
        hidden_BSD = None if arrival is None else arrival.wait()
        outputs = self._call(action.chunk, batch, hidden_BSD)
        if self._is_last(action.chunk):
            outputs, reported = self.losses.of_step(
                outputs, batch["labels"], step.num_targets, share=1 / len(step.micro_batches)
            )
            step.losses.append(reported)
        step.held[place] = (hidden_BSD, outputs)
        self._memory.end("forward")

    @_do.register
    def _send_activation(self, action: SendActivation) -> None:
        _, output_BSD = self._step.held[_place(action)]
        self._channels.send(output_BSD.detach(), "activation", to=action.peer)

    @_do.register
    def _backward_input(self, action: BackwardInput) -> None:
        assert self._weight_gradients is not None, "made for schedules with such actions"
        with self._weight_gradients.defer() as waiting:
            self._backward(action)
        self._step.waiting[_place(action)] = waiting

    @_do.register
    def _backward_weight(self, action: BackwardWeight) -> None:
        run_weight_backward(self._step.waiting.pop(_place(action)), self._reduction.sums)
        self._memory.end("backward")

    @_do.register
    def _whole_backward(self, action: Backward) -> None:
        self._backward(action)

    def _backward(self, action: Backward | BackwardInput) -> None:
        hidden_BSD, outputs = self._step.held.pop(_place(action))
        arrival = self._step.gradients.pop(_place(action), None)
        self._reduction.before_backward(action.chunk)
        if arrival is None:
            self._engine.backward(outputs, scale_wrt_gas=False)
        elif outputs.requires_grad:  # False for a frozen first stage
            expect_backward(self._engine)
            outputs.backward(arrival.wait())  # type: ignore[no-untyped-call]
        else:
            arrival.wait()
        if hidden_BSD is not None:
            assert hidden_BSD.grad is not None, "the stage's layers have used it"
            self._step.to_send[_place(action)] = hidden_BSD.grad
        self._memory.end("backward")

    @_do.register
    def _send_gradient(self, action: SendGradient) -> None:
        self._channels.send(self._step.to_send.pop(_place(action)), "gradient", to=action.peer)


class _Step:
    """The state of one step in flight, by chunk and micro-batch.

    Attributes:
        activations: Pending receives of stage inputs.
        gradients: Pending receives of gradients of stage outputs.
        held: Inputs and outputs of stages until their backward pass; for the last stage its loss.
        to_send: Gradients of inputs still to send.
        waiting: Weight-gradient halves of backward passes whose first half is done.
        losses: Losses of the micro-batches, detached.
    """

    def __init__(
        self, micro_batches: Sequence[dict[str, torch.Tensor]] = (), num_targets: torch.Tensor | None = None
    ) -> None:
        self.micro_batches = micro_batches
        self.num_targets: Any = num_targets
        self.activations: dict[_Place, PendingRecv] = {}
        self.gradients: dict[_Place, PendingRecv] = {}
        self.held: dict[_Place, tuple[torch.Tensor | None, torch.Tensor]] = {}
        self.to_send: dict[_Place, torch.Tensor] = {}
        self.waiting: dict[_Place, deque[DeferredWeightGrad]] = {}
        self.losses: list[torch.Tensor] = []


def _place(action: Instruction) -> _Place:
    return action.chunk, action.micro_batch
