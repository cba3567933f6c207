"""GPipe: all forward passes, then all backward passes."""

from __future__ import annotations

from toolkit.pipeline_schedule.instructions import Backward, Forward
from toolkit.pipeline_schedule.schedule import Schedule


def gpipe(pp: int, micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Build GPipe: every stage keeps the activations of all micro-batches.

    Args:
        pp: Number of pipeline ranks.
        micro_batches: Micro-batches of one step.
        virtual_stages: Always 1; `build_schedule` refuses other values.

    Source:
        arXiv 1811.06965, section 2.2.
    """
    order = (
        *(Forward(chunk=0, micro_batch=micro_batch) for micro_batch in range(micro_batches)),
        *(Backward(chunk=0, micro_batch=micro_batch) for micro_batch in range(micro_batches)),
    )
    return Schedule(
        name="gpipe", pp=pp, micro_batches=micro_batches, virtual_stages=virtual_stages, order=(order,) * pp
    )
