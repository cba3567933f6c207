"""Execution of a pipeline schedule on one rank: by the DeepSpeed engine's loop, and for stages of the user's own.

`ScheduleRunner` walks through a rank's instructions and keeps what waits between them; a subclass says how a stage computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import singledispatchmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from toolkit.arguments import Positive, checks_arguments
from toolkit.config.fields import PipelineSchedule
from toolkit.distributed.p2p import P2PChannels, PendingRecv
from toolkit.distributed.world import World
from toolkit.errors import PlanError, RunError, first_line, raise_all
from toolkit.pipeline_parallel.grads import Fp32GradAccumulator
from toolkit.pipeline_parallel.zero_bubble_backward import defer_weight_gradients, run_weight_backward
from toolkit.pipeline_schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    Schedule,
    SendActivation,
    SendGradient,
    actions,
    build_schedule,
    evaluation_actions,
    schedule_problems,
)
from toolkit.tensor_parallel.deferred_grads import DeferredWeightGrad, WeightGradStore
from toolkit.topology.communicators import MAX_SENDS_IN_FLIGHT, Message

Place = tuple[int, int]  # chunk of this rank, micro-batch
# Shape of a tensor, and any tensor of its dtype on its device.
Boundary = tuple[tuple[int, ...], torch.Tensor]


class ScheduleRunner(ABC):
    """The instructions of one rank, in order.

    Args:
        schedule: Schedule of a step.
        pp_rank: Pipeline rank.
        channels: This rank's channels to its neighbours.
        weight_gradients: Store of the weight gradients that a schedule with split backward passes defers; None for others.
    """

    def __init__(
        self, schedule: Schedule, pp_rank: int, channels: P2PChannels, weight_gradients: WeightGradStore | None
    ) -> None:
        self.schedule, self._pp_rank, self.channels = schedule, pp_rank, channels
        self._actions = actions(schedule, pp_rank)
        self._evaluation = evaluation_actions(schedule, pp_rank)
        self._weight_gradients = weight_gradients
        self._pending = _Pending()

    @abstractmethod
    def boundary(self, stage: int, micro_batch: int) -> Boundary:
        """Return the activation of a micro-batch that a stage receives, by shape and kind; its gradient is alike."""

    @abstractmethod
    def forward(self, chunk: int, micro_batch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Run one of the rank's stages, and return the activation for the next one; on the last the loss to differentiate."""

    @abstractmethod
    def backward(self, chunk: int, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Run the backward pass of what `forward` returned; `gradient` is that of the output, None for a loss."""

    def backward_weights(self, waiting: deque[DeferredWeightGrad]) -> None:
        """Compute deferred weight gradients and add them to those of the parameters."""
        run_weight_backward(waiting, self.gradient_sums)

    @property
    def gradient_sums(self) -> Fp32GradAccumulator | None:
        """Accumulator of gradients in fp32; None to accumulate in the parameters' own."""
        return None

    def is_last(self, chunk: int) -> bool:
        """Return whether one of the rank's stages is the pipeline's last."""
        return self.schedule.stage(self._pp_rank, chunk) == self.schedule.num_stages - 1

    def run_actions(self) -> None:
        """Run all passes of a step and send all messages."""
        self._pending = _Pending()
        for action in self._actions:
            self._do(action)
        self.channels.finish()

    def run_evaluation(self, forward: Callable[[int, torch.Tensor | None], Any]) -> Any:
        """Run one batch through this rank's stages, forward alone; in a sequence of calls no rank waits for the next.

        Args:
            forward: Runs a stage, given its chunk and what it receives.

        Returns:
            The output of the last stage; None on the other ranks.
        """
        received: torch.Tensor | None = None
        output: Any = None
        for action in self._evaluation:
            if isinstance(action, ReceiveActivation):
                received = self._receive(action).wait()
            elif isinstance(action, Forward):
                output = forward(action.chunk, received)
            elif isinstance(action, SendActivation):
                self.channels.send(output, "activation", to=action.peer)
                self.channels.finish(but=MAX_SENDS_IN_FLIGHT)  # no gradient returns for which this rank would wait
                output = None
        return output

    @singledispatchmethod
    def _do(self, action: Instruction) -> None:
        raise TypeError(f"{type(action).__name__} is not an instruction of a rank")

    @_do.register
    def _receive_activation(self, action: ReceiveActivation) -> None:
        self._pending.activations[_place(action)] = self._receive(action)

    @_do.register
    def _receive_gradient(self, action: ReceiveGradient) -> None:
        self._pending.gradients[_place(action)] = self._receive(action)

    def _receive(self, action: ReceiveActivation | ReceiveGradient) -> PendingRecv:
        stage = self.schedule.stage(self._pp_rank, action.chunk)
        kind: Message = "activation" if isinstance(action, ReceiveActivation) else "gradient"
        shape, like = self.boundary(stage + (kind == "gradient"), action.micro_batch)
        return self.channels.receive(shape, kind, source=action.peer, like=like)

    @_do.register
    def _forward(self, action: Forward) -> None:
        place = _place(action)
        arrival = self._pending.activations.pop(place, None)
        received = None if arrival is None else arrival.wait()
        self._pending.kept[place] = received, self.forward(action.chunk, action.micro_batch, received)

    @_do.register
    def _send_activation(self, action: SendActivation) -> None:
        _, output = self._pending.kept[_place(action)]
        self.channels.send(output.detach(), "activation", to=action.peer)

    @_do.register
    def _whole_backward(self, action: Backward) -> None:
        self._backward(action)

    @_do.register
    def _backward_input(self, action: BackwardInput) -> None:
        assert self._weight_gradients is not None, "made for schedules with such instructions"
        with self._weight_gradients.defer() as waiting:
            self._backward(action)
        self._pending.deferred[_place(action)] = waiting

    @_do.register
    def _backward_weight(self, action: BackwardWeight) -> None:
        self.backward_weights(self._pending.deferred.pop(_place(action)))

    def _backward(self, action: Backward | BackwardInput) -> None:
        received, output = self._pending.kept.pop(_place(action))
        arrival = self._pending.gradients.pop(_place(action), None)
        self.backward(action.chunk, output, None if arrival is None else arrival.wait())
        if received is not None:
            if received.grad is None:
                stage = self.schedule.stage(self._pp_rank, action.chunk)
                raise RunError.of(
                    code="PIPELINE_ACTIVATION",
                    key="stages",
                    message=f"the output of stage {stage}, or its loss, has no gradient with respect to what the stage receives",
                    fix="Compute it from the stage's input, without detach or no_grad",
                )
            self._pending.to_send[_place(action)] = received.grad

    @_do.register
    def _send_gradient(self, action: SendGradient) -> None:
        self.channels.send(self._pending.to_send.pop(_place(action)), "gradient", to=action.peer)


class _Pending:
    """What waits between the instructions of a step, by chunk and micro-batch.

    Attributes:
        activations: Receives of stage inputs.
        gradients: Receives of gradients of stage outputs.
        kept: Inputs and outputs of stages until their backward pass; for the last stage its loss.
        to_send: Gradients of inputs still to send.
        deferred: Weight-gradient halves of backward passes whose first half is done.
    """

    def __init__(self) -> None:
        self.activations: dict[Place, PendingRecv] = {}
        self.gradients: dict[Place, PendingRecv] = {}
        self.kept: dict[Place, tuple[torch.Tensor | None, torch.Tensor]] = {}
        self.to_send: dict[Place, torch.Tensor] = {}
        self.deferred: dict[Place, deque[DeferredWeightGrad]] = {}


def _place(action: Instruction) -> Place:
    return action.chunk, action.micro_batch


class PipelineRunner(ScheduleRunner):
    """Stages of the user's own, run by a pipeline schedule in a loop of plain torch.

    The stages pass one floating-point tensor to each other. Gradients accumulate in the parameters, as after
    `loss.backward()`, and are those of the mean loss of this replica's micro-batches; with several replicas, average them
    over the group `dp`.

    Args:
        stages: This rank's stages, first to last: those of index rank, rank + pp, …, of `split_sequential` for example. Modules
            on the device of `world`.
        world: Process groups and place of this rank, as `tk.groups.init` returns them.
        loss: Maps the last stage's output and the target of a micro-batch to its scalar loss.
        micro_batches: Micro-batches per step.
        schedule: `gpipe`, `1f1b`, `interleaved` or `zb-h1`; by default `interleaved` for several stages, else `1f1b`.

    Raises:
        PlanError: SCHEDULE_SIZE and others for numbers that the schedule cannot run; PIPELINE_UNUSED for several stages on
            one rank that is the whole pipeline; PIPELINE_RANKS_DIFFER.

    Collectives:
        The ranks of one pipeline compare their arguments and create their channels.
    """

    @checks_arguments
    def __init__(
        self,
        stages: Sequence[nn.Module],
        world: World,
        *,
        loss: Callable[[torch.Tensor, Any], torch.Tensor],
        micro_batches: Positive,
        schedule: PipelineSchedule | None = None,
    ) -> None:
        self.stages, self._world, self._loss = list(stages), world, loss
        name = schedule or ("interleaved" if len(self.stages) > 1 else "1f1b")
        sizes: Mapping[str, int] = {
            "pp": world.grid.pp,
            "micro_batches": micro_batches,
            "virtual_stages": len(self.stages),
        }
        raise_all(PlanError, schedule_problems(name, **sizes))
        if world.grid.pp == 1 and len(self.stages) > 1:
            raise PlanError.of(
                code="PIPELINE_UNUSED",
                key="stages",
                message=f"{len(self.stages)} stages were given to a pipeline of one rank, which would send them to itself",
                fix="Give one stage: nn.Sequential(*stages)",
            )
        _agree({"schedule": name, "micro_batches": micro_batches, "stages": len(self.stages)}, world)
        made = build_schedule(name, **sizes)
        splits = any(isinstance(step, BackwardInput) for step in made.order[world.coordinate.pp])
        channels = P2PChannels(world.grid, world.rank, device=world.device, wraps=len(self.stages) > 1)
        deferred = defer_weight_gradients(self.stages) if splits else None
        super().__init__(made, world.coordinate.pp, channels, deferred)
        self._boundaries: list[Boundary] = []
        self._input_kind: tuple[torch.Size, torch.dtype] | None = None
        self._inputs: Sequence[torch.Tensor] = ()
        self._targets: Sequence[Any] = ()
        self._losses: list[torch.Tensor] = []

    @checks_arguments
    def step(self, inputs: Sequence[torch.Tensor] = (), targets: Sequence[Any] = ()) -> torch.Tensor:
        """Run the forward and backward passes of all micro-batches; the optimizer is the caller's.

        In the first step every stage but the last also runs once on fake tensors, which shows the shape that it sends.

        Args:
            inputs: Input of the first stage for each micro-batch, all of one shape and type, in every step; read on the first
                rank alone.
            targets: Target of each micro-batch; read on the last rank alone.

        Returns:
            Mean loss of the micro-batches, detached; the same scalar on every rank of the pipeline.

        Raises:
            RunError: STEP_MICRO_BATCHES if the first or the last rank is given another number of them; STEP_INPUT_SHAPE for
                inputs that differ in shape or type; PIPELINE_ACTIVATION if a stage does not return one floating-point tensor;
                PIPELINE_LOSS if the loss is not a scalar tensor.

        Collectives:
            The messages of the schedule and one broadcast over the group `pp`; in the first step one more for each stage.
        """
        self._inputs = self._checked("inputs", inputs, first=True)
        self._targets = self._checked("targets", targets, first=False)
        if self._pp_rank == 0:
            self._check_inputs()
        if not self._boundaries:
            self._boundaries = self._find_boundaries()
            self._input_kind = _kind(self._inputs[0]) if self._pp_rank == 0 else None
        self._losses = []
        self.run_actions()
        count = self.schedule.micro_batches
        mean = torch.zeros((), device=self._world.device)
        for loss in self._losses:
            mean += loss.to(mean.dtype) / count
        group = self._world.group("pp")
        dist.broadcast(mean, src=dist.get_global_rank(group, self._world.grid.pp - 1), group=group)
        return mean

    def boundary(self, stage: int, micro_batch: int) -> Boundary:
        """Return the activation that a stage receives."""
        return self._boundaries[stage]

    def forward(self, chunk: int, micro_batch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Run one of this rank's stages."""
        given = self._inputs[micro_batch] if received is None else _writable(received)
        output = self.stages[chunk](given)
        if not self.is_last(chunk):
            return output  # type: ignore[no-any-return]
        loss = self._loss(output, self._targets[micro_batch])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise RunError.of(
                code="PIPELINE_LOSS",
                key="loss",
                message=f"loss() returned {kind}: it must be a scalar tensor",
                fix="Return the mean over the micro-batch's output",
            )
        self._losses.append(loss.detach().reshape(()))
        return loss / self.schedule.micro_batches

    def backward(self, chunk: int, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Run the backward pass of a stage; a first stage without trained parameters has none."""
        if output.requires_grad:
            output.backward(gradient)  # type: ignore[no-untyped-call]

    def _checked(self, name: str, values: Sequence[Any], *, first: bool) -> Sequence[Any]:
        reads = self._pp_rank == (0 if first else self.schedule.pp - 1)
        if reads and len(values) != self.schedule.micro_batches:
            raise RunError.of(
                code="STEP_MICRO_BATCHES",
                key=name,
                message=f"step() got {len(values)} {name}, micro_batches={self.schedule.micro_batches}",
                fix=f"Pass a sequence of {self.schedule.micro_batches} tensors on the {'first' if first else 'last'} rank",
            )
        return values

    def _check_inputs(self) -> None:
        """Refuse inputs of which the other ranks would expect another shape: they find out in the first step alone."""
        shape, dtype = self._input_kind or _kind(self._inputs[0])
        for index, given in enumerate(self._inputs):
            if _kind(given) != (shape, dtype):
                raise RunError.of(
                    code="STEP_INPUT_SHAPE",
                    key="inputs",
                    message=f"inputs[{index}] is {given.dtype} of shape {tuple(given.shape)}, the first input of the first step was "
                    f"{dtype} of shape {tuple(shape)}: each stage receives one shape",
                    fix="Pad the inputs or drop the last, smaller batch; for other shapes make another PipelineRunner",
                )

    def _find_boundaries(self) -> list[Boundary]:
        """Return what each stage receives: every stage runs once on fake tensors, and its rank tells the others."""
        group, device = self._world.group("pp"), self._world.device
        found: list[Boundary] = [((), torch.empty(0, device=device))]  # nothing is sent to the first stage
        for stage in range(self.schedule.num_stages - 1):
            owner, chunk = self.schedule.place(stage)
            told: list[Any] = [None]
            if owner == self._pp_rank:
                shape, like = (self._inputs[0].shape, self._inputs[0]) if stage == 0 else found[stage]
                told = [_output_of(self.stages[chunk], shape, like, stage)]
            dist.broadcast_object_list(told, src=dist.get_global_rank(group, owner), group=group, device=device)
            if isinstance(told[0], RunError):
                raise told[0]
            shape, dtype = told[0]
            found.append((tuple(shape), torch.empty(0, dtype=dtype, device=device)))
        return found


def _writable(received: torch.Tensor) -> torch.Tensor:
    given: torch.Tensor = _Writable.apply(received.requires_grad_())  # type: ignore[no-untyped-call]
    return given


class _Writable(torch.autograd.Function):
    """The same tensor, which a stage may change in place: autograd refuses that of a leaf, which `received` is."""

    @staticmethod
    def forward(ctx: Any, received: torch.Tensor) -> torch.Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _agree(own: Mapping[str, Any], world: World) -> None:
    """Refuse a pipeline whose ranks would run different schedules, and so wait for messages that nobody sends."""
    found: list[Any] = [None] * world.grid.pp
    dist.all_gather_object(found, own, group=world.group("pp"))
    differing = [
        f"{key}={', '.join(str(each[key]) for each in found)}" for key in own if len({each[key] for each in found}) > 1
    ]
    if differing:
        raise PlanError.of(
            code="PIPELINE_RANKS_DIFFER",
            key="stages",
            message=f"the ranks of the pipeline were given {'; '.join(differing)}",
            fix="Give each rank the same number of stages and of micro-batches, and the same schedule",
        )


def _output_of(
    stage: nn.Module, shape: Sequence[int], like: torch.Tensor, index: int
) -> tuple[torch.Size, torch.dtype] | RunError:
    """Return shape and dtype of a stage's output; an error, which every rank raises, if it fails or no stage can receive it."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            # Fake buffers, too: a real one that counts batches would count this run.
            state: dict[str, torch.Tensor] = {
                name: mode.from_tensor(real) for name, real in (*stage.named_parameters(), *stage.named_buffers())
            }
            output = functional_call(stage, state, (torch.empty(tuple(shape), dtype=like.dtype, device=like.device),))
    except Exception as error:
        failure = RunError.of(
            code="PIPELINE_ACTIVATION",
            key="stages",
            message=f"stage {index} ({type(stage).__name__}) fails on a fake tensor of shape {tuple(shape)}, by which the shape of "
            f"its output is found: {type(error).__name__}: {first_line(error)}",
            fix="Fix the stage for that shape; it cannot read the values of tensors, as .item() does",
        )
        failure.__cause__ = error
        return failure
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        return output.shape, output.dtype
    kind = f"a tensor of {output.dtype}" if isinstance(output, torch.Tensor) else type(output).__name__
    return RunError.of(
        code="PIPELINE_ACTIVATION",
        key="stages",
        message=f"stage {index} ({type(stage).__name__}) returns {kind}; the next stage can receive one floating-point tensor",
        fix="Return one tensor from each stage but the last, such as the hidden states",
    )
