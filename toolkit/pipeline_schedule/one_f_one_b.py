"""1F1B: each backward pass runs as soon as it can, so that few micro-batches are in flight."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.pipeline_schedule.instructions import Backward, Compute, Forward
from toolkit.pipeline_schedule.schedule import Schedule


def one_f_one_b(pp: int, micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Build 1F1B: as fast as GPipe, but stage s keeps the activations of at most pp - s micro-batches.

    Args:
        pp: Number of pipeline ranks.
        micro_batches: Micro-batches of one step.
        virtual_stages: Always 1; `build_schedule` refuses other values.

    Source:
        arXiv 2104.04473, section 2.2.1 (PipeDream-Flush).
    """
    forwards = [Forward(chunk=0, micro_batch=micro_batch) for micro_batch in range(micro_batches)]
    backwards = [Backward(chunk=0, micro_batch=micro_batch) for micro_batch in range(micro_batches)]
    order = tuple(alternate(forwards, backwards, warm_up=pp - 1 - rank) for rank in range(pp))
    return Schedule(name="1f1b", pp=pp, micro_batches=micro_batches, virtual_stages=virtual_stages, order=order)


def alternate(forwards: Sequence[Forward], backwards: Sequence[Compute], *, warm_up: int) -> tuple[Compute, ...]:
    """Return `warm_up` forward passes, then alternate one forward and one backward, then the remaining backward passes."""
    order: list[Compute] = list(forwards[:warm_up])
    pairs = len(forwards) - len(order)
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[pairs:])
