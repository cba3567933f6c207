"""The batch equation: train = micro × accumulation × data-parallel ranks, solved exactly or not at all."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import PositiveInt

from toolkit.errors import PlanError
from toolkit.topology.grid import divisors

# Tokens of one forward pass that keep a card's matrix units busy; the default micro batch aims at it.
TARGET_MICRO_BATCH_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences of one optimizer step.

    Args:
        micro: Sequences per data-parallel rank and forward pass.
        accumulation: Micro batches per optimizer step.
        dp_size: Data-parallel ranks that read different rows; those of a context group count once.
    """

    micro: PositiveInt
    accumulation: PositiveInt
    dp_size: PositiveInt

    @property
    def train(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.micro * self.accumulation * self.dp_size

    def __str__(self) -> str:
        ranks = "data-parallel rank" + ("" if self.dp_size == 1 else "s")
        return f"{self.train} = {self.micro} micro × {self.accumulation} accumulation × {self.dp_size} {ranks}"


def solve_batch(
    *,
    micro: int | None,
    accumulation: int | None,
    train: int | None,
    dp_size: int,
    sequence_length: int,
    wanted_accumulation: int = 1,
) -> Batch:
    """Solve the batch equation for the values that are not given.

    Args:
        micro: Sequences per rank and forward pass, or None.
        accumulation: Micro batches per step, or None.
        train: Sequences per step over all ranks, or None.
        dp_size: Data-parallel ranks.
        sequence_length: Tokens per sequence; sets the micro batch when it is not given.
        wanted_accumulation: Fewest micro batches per step, where the other values do not determine them.

    Raises:
        PlanError: BATCH_EQUATION when no whole numbers solve it; the message lists the triples that do.

    >>> str(solve_batch(micro=2, accumulation=None, train=32, dp_size=4, sequence_length=2048))
    '32 = 2 micro × 4 accumulation × 4 data-parallel ranks'
    >>> str(solve_batch(micro=None, accumulation=None, train=32, dp_size=1, sequence_length=512, wanted_accumulation=8))
    '32 = 4 micro × 8 accumulation × 1 data-parallel rank'
    """
    if train is None:
        chosen = micro if micro is not None else default_micro(sequence_length)
        return Batch(micro=chosen, accumulation=accumulation or wanted_accumulation, dp_size=dp_size)
    share, remainder = divmod(train, dp_size)
    if remainder or not share:
        raise _unsolvable(micro, accumulation, train, dp_size)
    if micro is None and accumulation is None:
        largest = max(1, min(default_micro(sequence_length), share // wanted_accumulation))
        micro = max(size for size in divisors(share) if size <= largest)
    if micro is None:
        assert accumulation is not None
        micro, remainder = divmod(share, accumulation)
    elif accumulation is None:
        accumulation, remainder = divmod(share, micro)
    else:
        remainder = share - micro * accumulation
    if remainder or not micro or not accumulation:
        raise _unsolvable(micro, accumulation, train, dp_size)
    return Batch(micro=micro, accumulation=accumulation, dp_size=dp_size)


def default_micro(sequence_length: int) -> int:
    """Return the largest power of two of sequences that stays within the target number of tokens per forward pass.

    >>> default_micro(2048), default_micro(8192)
    (2, 1)
    """
    return 1 << max(0, (TARGET_MICRO_BATCH_TOKENS // sequence_length).bit_length() - 1)


def valid_triples(train: int, dp_size: int) -> tuple[Batch, ...]:
    """List every way to write a train batch as micro × accumulation × ranks, smallest micro batch first."""
    share, remainder = divmod(train, dp_size)
    if remainder or not share:
        return ()
    return tuple(Batch(micro=micro, accumulation=share // micro, dp_size=dp_size) for micro in divisors(share))


def _unsolvable(micro: int | None, accumulation: int | None, train: int, dp_size: int) -> PlanError:
    ranks = f"{dp_size} data-parallel rank{'s' if dp_size > 1 else ''}"
    # The nearest batch that the ranks divide; a tie goes to the smaller.
    target = max(1, -(-(2 * train - dp_size) // (2 * dp_size))) * dp_size
    triples = valid_triples(target, dp_size)
    shown = ", ".join(f"{batch.micro}×{batch.accumulation}" for batch in triples[:12])
    left = "" if target == train else f"train_batch_size={target} (the nearest that {dp_size} divides) with "
    return PlanError.of(
        code="BATCH_EQUATION",
        key="train.train_batch_size",
        message=(
            f"train_batch_size={train} is not per_device_train_batch_size={micro or 'any'} × "
            f"gradient_accumulation_steps={accumulation or 'any'} × {ranks}"
            + (f" = {micro * accumulation * dp_size}" if micro and accumulation else "")
            + (": all ranks of a pipeline, tensor or context group count once" if dp_size == 1 else "")
        ),
        fix=f"Set {left}micro × accumulation to one of {shown}"
        + (", or start more data-parallel ranks" if dp_size == 1 else "")
        + ", or leave one of the three out",
        source="deepspeed runtime/config.py _batch_assertion",
    )
