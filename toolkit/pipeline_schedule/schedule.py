"""A schedule: for each pipeline rank, the order of its forward and backward passes. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from toolkit.config.fields import PipelineSchedule
from toolkit.pipeline_schedule.instructions import Backward, BackwardWeight, Compute, Forward


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Compute instructions of every rank in one step, in order; `actions` adds the messages between ranks.

    Args:
        name: Name of the schedule.
        pp: Number of pipeline ranks.
        micro_batches: Micro-batches per step and data-parallel replica.
        virtual_stages: Chunks of each rank.
        order: Compute instructions of each rank.
    """

    name: PipelineSchedule
    pp: int
    micro_batches: int
    virtual_stages: int = 1
    order: tuple[tuple[Compute, ...], ...]

    @property
    def num_stages(self) -> int:
        """Number of stages of the model: pp × virtual_stages."""
        return self.pp * self.virtual_stages

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage of a rank's chunk."""
        return chunk * self.pp + rank

    def place(self, stage: int) -> tuple[int, int]:
        """Return the rank and chunk of a stage."""
        chunk, rank = divmod(stage, self.pp)
        return rank, chunk

    def peak_in_flight(self, rank: int) -> int:
        """Return the largest number of (chunk, micro-batch) pairs whose activations a rank keeps at the same time.

        Receives that are posted before their use come on top: with the default of `actions`, one hidden state.
        """
        return max(map(sum, self._held(rank)), default=0)

    def peak_in_flight_of_stage(self, stage: int) -> int:
        """Return the largest number of micro-batches whose activations one stage keeps at the same time."""
        rank, chunk = self.place(stage)
        return max((held[chunk] for held in self._held(rank)), default=0)

    def _held(self, rank: int) -> list[tuple[int, ...]]:
        """Return the number of micro-batches that each chunk of a rank keeps during each of its instructions."""
        held = [0] * self.virtual_stages
        found = []
        for instruction in self.order[rank]:
            if isinstance(instruction, Forward):
                held[instruction.chunk] += 1
            found.append(tuple(held))
            if isinstance(instruction, Backward | BackwardWeight):
                held[instruction.chunk] -= 1
        return found
