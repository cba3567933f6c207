"""The program of a pipeline rank in one step or in an evaluation, as far as memory is concerned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.config.fields import PipelineSchedule
from toolkit.pipeline_schedule import (
    Backward,
    BackwardInput,
    Compute,
    Forward,
    Instruction,
    Schedule,
    actions,
    build_schedule,
    evaluation_actions,
)
from toolkit.pipeline_schedule.interleaved import round_sizes
from toolkit.planning.plan import Plan

# Micro-batches beyond those that fill the pipeline: enough to show the steady state of a rank, and for ZeRO-3 to record
# an order of modules and follow it.
STEADY = 3
# Rounds (pipeline_schedule/interleaved.py): the first two fill the pipeline.
ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """The passes and messages of one step.

    Args:
        actions: Actions of the rank, in order; of fewer micro-batches than the step has where more would only repeat.
        num_micro_batches: Micro-batches of the step, all of which are on the device from its start to its end.
        reduces_once: Whether gradients are reduced at the end of the step, rather than after each backward pass.
        sums_in_fp32: Whether whole 16-bit gradients are accumulated in fp32 (pipeline_parallel/grads.py).
    """

    actions: tuple[Instruction, ...]
    num_micro_batches: int
    reduces_once: bool
    sums_in_fp32: bool = False

    def following_phases(self) -> list[str]:
        """Return the phase after each action, which is that of the next compute, as the engine measures it."""
        found: list[str] = []
        phase = "backward"
        for action in reversed(self.actions):
            found.append(phase)
            if isinstance(action, Compute):
                phase = "forward" if isinstance(action, Forward) else "backward"
        return found[::-1]

    def peak_in_flight(self, sizes: Sequence[int]) -> int:
        """Return the peak of bytes, where each chunk keeps its `sizes` from its forward to its backward pass."""
        most = level = 0
        for action in self.actions:
            if isinstance(action, Forward):
                level += sizes[action.chunk]
            elif isinstance(action, Backward | BackwardInput):
                level -= sizes[action.chunk]
            most = max(most, level)
        return most


def step_program(plan: Plan, pp_rank: int) -> StepProgram:
    """Return the program of a pipeline rank in one step, with fewer micro-batches where these need as much memory."""
    settings = plan.settings
    schedule = build_schedule(
        settings.pipeline_schedule,
        pp=plan.grid.pp,
        micro_batches=representative_micro_batches(
            settings.pipeline_schedule, pp=plan.grid.pp, micro_batches=settings.batch.accumulation
        ),
        virtual_stages=settings.virtual_stages,
    )
    return StepProgram(
        actions=actions(schedule, pp_rank),
        num_micro_batches=settings.batch.accumulation,
        reduces_once=settings.reduces_once,
        sums_in_fp32=settings.sums_in_fp32,
    )


def representative_micro_batches(schedule: PipelineSchedule, *, pp: int, micro_batches: int) -> int:
    """Return how many micro-batches show the memory of a step.

    >>> [representative_micro_batches(name, pp=4, micro_batches=64) for name in ("1f1b", "interleaved")]
    [7, 16]
    >>> representative_micro_batches("interleaved", pp=4, micro_batches=66)  # in rounds of 5, 5, 4, 4 …
    18
    """
    if schedule == "gpipe":
        return micro_batches
    if schedule == "1f1b":
        return min(micro_batches, pp + STEADY)
    return sum(round_sizes(pp, micro_batches)[:ROUNDS])


def evaluation_program(plan: Plan, pp_rank: int) -> StepProgram:
    """Return the program of a rank in an evaluation: batch by batch through its chunks (engine/pipeline.py outputs)."""
    settings = plan.settings
    stages = Schedule(  # without an order, which would be built for every micro-batch of a step
        name=settings.pipeline_schedule,
        pp=plan.grid.pp,
        micro_batches=STEADY,
        virtual_stages=settings.virtual_stages,
        order=(),
    )
    steps = evaluation_actions(stages, pp_rank, batches=STEADY)
    return StepProgram(actions=steps, num_micro_batches=1, reduces_once=True)
