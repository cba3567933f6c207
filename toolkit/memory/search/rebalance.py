"""Another split of a pipeline, with which every stage fits its card, and the slowest is as fast as possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.errors import PlanError
from toolkit.pipeline_schedule import partition
from toolkit.planning.pipeline_layout import operations
from toolkit.planning.plan import Plan

if TYPE_CHECKING:
    from toolkit.memory.search.estimator import Estimator, StageRequirements


def rebalance_partition(estimator: Estimator, plan: Plan) -> tuple[int, ...] | None:
    """Return the layers of each stage with which all stages fit; None where no split fits, or the plan's own does.

    Chunks of virtual stages share a card, so that no chunk can be judged alone: such pipelines are not changed.
    """
    capacity = plan.gpu.memory_bytes
    if plan.grid.pp == 1 or plan.settings.virtual_stages > 1 or capacity is None:
        return None
    stages = estimator.stages(plan)
    room = _Room(stages, num_layers=plan.model.num_hidden_layers, num_stages=plan.grid.pp, capacity_bytes=capacity)
    layers, last = operations(plan.model, sequence_length=plan.settings.sequence_length)
    try:
        found = partition(layers, plan.grid.pp, last=last, memory=room.bytes_of, capacity=capacity)
    except PlanError as error:
        if error.codes != ("PARTITION_MEMORY",):
            raise
        return None
    return None if found == plan.settings.partition else found


class _Room:
    """The memory that stages need, as far as a search must know; of equal layers only the most that a stage can hold.

    Args:
        stages: Requirements of the stages.
        num_layers: Layers of the model.
        num_stages: Stages of the pipeline.
        capacity_bytes: Memory of a card.
    """

    def __init__(self, stages: StageRequirements, *, num_layers: int, num_stages: int, capacity_bytes: int) -> None:
        self._stages, self._num_layers, self._num_stages = stages, num_layers, num_stages
        self._capacity = capacity_bytes
        self._most: dict[int, int] = {}

    def bytes_of(self, stage: int, start: int, stop: int) -> float:
        """Return the bytes of a stage with the layers start … stop - 1; of equal layers, 0 if they fit, else twice the card's."""
        if not self._stages.layers_are_alike:
            return float(self._stages.required_bytes(stage, start, stop))
        if stage not in self._most:
            self._most[stage] = self._find_most(stage)
        return 0.0 if stop - start <= self._most[stage] else 2.0 * self._capacity

    def _find_most(self, stage: int) -> int:
        """Return the most layers that a stage can hold, by bisection: more layers never need less."""
        fits, fails = 0, self._num_layers - self._num_stages + 2
        while fails - fits > 1:
            middle = (fits + fails) // 2
            start = self._num_layers - middle if stage == self._num_stages - 1 else min(stage, 1)
            if self._stages.required_bytes(stage, start, start + middle) <= self._capacity:
                fits = middle
            else:
                fails = middle
        return fits
