"""What a rank of a pipeline does in one step, as far as memory goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.pipeline_schedule import Backward, BackwardInput, Compute, Forward, Instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """The passes and messages of one step.

    Args:
        actions: Of the rank, in order; of fewer micro-batches than the step has where more repeat the same.
        num_micro_batches: Of the step, all of which are on the device from its start to its end.
        reduces_once: Whether gradients stay whole to the end of the step; else they are reduced after each backward pass.
        sums_in_fp32: Whether whole gradients of 16 bit are added up in fp32 (pipeline_parallel/grads.py).
    """

    actions: tuple[Instruction, ...]
    num_micro_batches: int
    reduces_once: bool
    sums_in_fp32: bool = False

    def following_phases(self) -> list[str]:
        """Return for each action the phase that it leaves behind, that of the next compute, as the engine measures it."""
        found: list[str] = []
        phase = "backward"
        for action in reversed(self.actions):
            found.append(phase)
            if isinstance(action, Compute):
                phase = "forward" if isinstance(action, Forward) else "backward"
        return found[::-1]

    def peak_in_flight(self, sizes: Sequence[int]) -> int:
        """Return the most that is held at once, where each chunk holds `sizes` from its forward to its backward pass."""
        most = level = 0
        for action in self.actions:
            if isinstance(action, Forward):
                level += sizes[action.chunk]
            elif isinstance(action, Backward | BackwardInput):
                level -= sizes[action.chunk]
            most = max(most, level)
        return most
