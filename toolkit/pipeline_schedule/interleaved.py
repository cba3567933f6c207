"""Interleaved 1F1B: each rank has several chunks of the model, so that the pipeline fills in less time."""

from __future__ import annotations

from toolkit.pipeline_schedule.instructions import Backward, Forward
from toolkit.pipeline_schedule.one_f_one_b import alternate
from toolkit.pipeline_schedule.schedule import Schedule


def interleaved(pp: int, micro_batches: int, virtual_stages: int) -> Schedule:
    """Build Megatron's interleaved 1F1B: 1 / virtual_stages of the bubble, for as many times the messages.

    A round of micro-batches goes through the first chunks of all ranks, then through their second ones. Megatron requires
    rounds of pp micro-batches. If pp does not divide their number, the rounds here are larger, the largest first: a smaller
    one would leave ranks waiting in every round, and a round that follows a smaller one could not start.

    Args:
        pp: Number of pipeline ranks.
        micro_batches: Micro-batches of one step; multiples of pp give the smallest bubble and the fewest activations.
        virtual_stages: Chunks of each rank, at least 2.

    Source:
        arXiv 2104.04473, section 2.2.2.
    """
    forwards, backwards = round_order(pp, micro_batches, virtual_stages)
    largest = round_sizes(pp, micro_batches)[0]
    order = tuple(
        alternate(
            [Forward(chunk=chunk, micro_batch=micro_batch) for chunk, micro_batch in forwards],
            [Backward(chunk=chunk, micro_batch=micro_batch) for chunk, micro_batch in backwards],
            # A micro-batch comes back to a rank 2 slots later for each rank after it.
            warm_up=(virtual_stages - 1) * largest + 2 * (pp - 1 - rank),
        )
        for rank in range(pp)
    )
    return Schedule(name="interleaved", pp=pp, micro_batches=micro_batches, virtual_stages=virtual_stages, order=order)


def round_sizes(pp: int, micro_batches: int) -> tuple[int, ...]:
    """Return the number of micro-batches of each round: as many rounds of at least pp as possible, the larger ones first.

    >>> round_sizes(4, 8), round_sizes(4, 11), round_sizes(4, 3)
    ((4, 4), (6, 5), (3,))
    """
    rounds = max(1, micro_batches // pp)
    size, larger = divmod(micro_batches, rounds)
    return (size + 1,) * larger + (size,) * (rounds - larger)


def round_order(
    pp: int, micro_batches: int, virtual_stages: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the (chunk, micro-batch) pairs of a rank in forward order, and in backward order."""
    forwards: list[tuple[int, int]] = []
    backwards: list[tuple[int, int]] = []
    first = 0
    for size in round_sizes(pp, micro_batches):
        members = range(first, first + size)
        forwards += [(chunk, member) for chunk in range(virtual_stages) for member in members]
        backwards += [(chunk, member) for chunk in reversed(range(virtual_stages)) for member in members]
        first += size
    return forwards, backwards
