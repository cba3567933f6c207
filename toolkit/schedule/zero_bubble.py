"""ZB-H1: the gradient of the weights, for which no other stage waits, fills the time in which a rank would idle."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.schedule.instructions import Backward, BackwardInput, BackwardWeight, Compute, Forward
from toolkit.schedule.one_f_one_b import alternate
from toolkit.schedule.schedule import Schedule


def zero_bubble(pp: int, micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Builds ZB-H1: a third of 1F1B's bubble, with every rank holding what 1F1B's first rank holds.

    Rank p does the weights of a micro-batch p backward passes late: as long as the bubble that they fill at the end.
    The first stage sends no gradient and is never late, so that its two halves are one `Backward`.

    Args:
        pp: Pipeline ranks.
        micro_batches: Of one step.
        virtual_stages: 1; `build_schedule` refuses others.

    Source:
        arXiv 2401.10241, section 2.3 and figure 3.
    """
    forwards = [Forward(chunk=0, micro_batch=micro_batch) for micro_batch in range(micro_batches)]
    inputs = [BackwardInput(chunk=0, micro_batch=micro_batch) for micro_batch in range(micro_batches)]
    whole = [Backward(chunk=0, micro_batch=micro_batch) for micro_batch in range(micro_batches)]
    order = [alternate(forwards, whole, warm_up=pp - 1)]
    order += [_with_weights(alternate(forwards, inputs, warm_up=pp - 1 - rank), late=rank) for rank in range(1, pp)]
    return Schedule(name="zb-h1", pp=pp, micro_batches=micro_batches, virtual_stages=virtual_stages, order=tuple(order))


def _with_weights(order: Sequence[Compute], *, late: int) -> tuple[Compute, ...]:
    """Puts each `BackwardWeight` behind the `BackwardInput` that comes `late` after its own, or at the end."""
    weights = [
        BackwardWeight(chunk=instruction.chunk, micro_batch=instruction.micro_batch)
        for instruction in order
        if isinstance(instruction, BackwardInput)
    ]
    found: list[Compute] = []
    waiting = 0
    done = 0
    for instruction in order:
        found.append(instruction)
        if isinstance(instruction, BackwardInput):
            waiting += 1
            if waiting > late:
                found.append(weights[done])
                done, waiting = done + 1, waiting - 1
    return (*found, *weights[done:])
