"""ZB-H1: the gradient of the weights, for which no other stage waits, fills the time in which a rank would idle."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.pipeline_schedule.instructions import Backward, BackwardInput, BackwardWeight, Compute, Forward
from toolkit.pipeline_schedule.interleaved import round_order, round_sizes
from toolkit.pipeline_schedule.one_f_one_b import alternate
from toolkit.pipeline_schedule.schedule import Schedule


def zero_bubble(pp: int, micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Build ZB-H1: a third of 1F1B's bubble, with the activations of 1F1B's first rank on every rank.

    Rank p computes the weight gradients of a micro-batch p backward passes late, so that they fill the bubble at the end.
    Several chunks per rank divide the bubble by their number too. Passes of a kind then have the order of interleaved 1F1B,
    with pp - 1 - rank fewer forward passes before the first backward pass. Rank p keeps the activations of
    (chunks - 1) × round + pp passes, as every other rank does: at most p more than interleaved 1F1B's rank p, and no more
    than its first. Of these up to p + 1 are between their halves.

    The first stage sends no gradient and defers nothing, so its two halves are one `Backward`.

    Args:
        pp: Number of pipeline ranks.
        micro_batches: Micro-batches of one step.
        virtual_stages: Chunks of each rank.

    Source:
        arXiv 2401.10241, section 2.3 and figure 3; with chunks, as torch.distributed.pipelining's
        ScheduleInterleavedZeroBubble.
    """
    forwards, backwards = round_order(pp, micro_batches, virtual_stages)
    largest = round_sizes(pp, micro_batches)[0]
    order = tuple(
        _with_weights(
            alternate(
                [Forward(chunk=chunk, micro_batch=micro_batch) for chunk, micro_batch in forwards],
                [BackwardInput(chunk=chunk, micro_batch=micro_batch) for chunk, micro_batch in backwards],
                # A gradient comes back to a rank 1 slot later for each rank after it: weight gradients do not delay it.
                warm_up=(virtual_stages - 1) * largest + pp - 1 - rank,
            ),
            rank=rank,
        )
        for rank in range(pp)
    )
    return Schedule(name="zb-h1", pp=pp, micro_batches=micro_batches, virtual_stages=virtual_stages, order=order)


def _with_weights(order: tuple[Compute, ...], *, rank: int) -> tuple[Compute, ...]:
    """Make the backward passes of the first stage whole, and defer the weight gradients of others by `rank` passes."""
    return tuple(
        Backward(chunk=0, micro_batch=instruction.micro_batch) if _is_first(instruction, rank) else instruction
        for instruction in _delayed(order, late=rank)
        if not (isinstance(instruction, BackwardWeight) and rank == instruction.chunk == 0)
    )


def _is_first(instruction: Compute, rank: int) -> bool:
    return isinstance(instruction, BackwardInput) and rank == instruction.chunk == 0


def _delayed(order: tuple[Compute, ...], *, late: int) -> Iterator[Compute]:
    """Put each `BackwardWeight` after the `BackwardInput` that follows its own by `late`, or at the end."""
    waiting: list[BackwardWeight] = []
    for instruction in order:
        yield instruction
        if isinstance(instruction, BackwardInput):
            waiting.append(BackwardWeight(chunk=instruction.chunk, micro_batch=instruction.micro_batch))
            if len(waiting) > late:
                yield waiting.pop(0)
    yield from waiting
