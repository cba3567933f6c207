"""Partitioning of decoder layers into pipeline stages: runs of layers such that the slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import lcm
from typing import TypeAlias

from toolkit.errors import PlanError
from toolkit.units import format_bytes

# Memory in bytes of a stage with layers start … stop - 1: (stage, start, stop). More layers never take fewer bytes.
StageMemory: TypeAlias = Callable[[int, int, int], float]
# Cost of a run of layers on a stage, or None if they do not fit; a longer run costs no less.
_RunCost: TypeAlias = Callable[[int, int, int], float | None]


def partition(
    costs: Sequence[float],
    stages: int,
    *,
    first: float = 0.0,
    last: float = 0.0,
    memory: StageMemory | None = None,
    capacity: float | Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Return the number of layers of each stage such that the slowest stage is as fast as possible, and all stages fit.

    Found by dynamic programming, so no other partition is better. Among equally good ones it takes the most even, and among
    those one with few layers on the first stages, which keep the most micro-batches in flight.

    With virtual stages, pass pp × virtual_stages as `stages`. Stages are then balanced, not the sums of a rank's chunks,
    and memory is compared chunk by chunk: `capacity` is what one chunk may take.

    >>> partition([1.0] * 8, 4, last=1.0)
    (2, 2, 2, 2)
    >>> partition([1.0] * 8, 4, last=2.0)
    (2, 2, 3, 1)

    Args:
        costs: Cost of each layer: seconds, FLOPs or parameters; at least 0.
        stages: Number of stages, each of at least one layer.
        first: Extra cost of the first stage, the embedding; in the unit of `costs`.
        last: Extra cost of the last stage: norm, head and loss.
        memory: Memory of a stage in bytes, with its micro-batches in flight.
        capacity: Bytes that any stage may take, or one number per stage; with `memory`.

    Raises:
        PlanError: PARTITION_STAGES, if there are more stages than layers; PARTITION_MEMORY, if no partition fits.
    """
    num_layers = len(costs)
    _check_stages(num_layers, stages)
    if (memory is None) != (capacity is None):
        raise ValueError("memory and capacity go together")
    if min(*costs, first, last, 0.0) < 0:
        raise ValueError("a cost is below 0")
    *layers, before, behind = _whole_numbers([*costs, first, last])
    sums = list(accumulate(layers, initial=0))
    limits = None if capacity is None else _of_each_stage(capacity, stages)

    def cost(stage: int, start: int, stop: int) -> float | None:
        if memory is not None and limits is not None and memory(stage, start, stop) > limits[stage]:
            return None
        return sums[stop] - sums[start] + (before if stage == 0 else 0) + (behind if stage == stages - 1 else 0)

    best = _least(num_layers, stages, cost, combine=max)
    if best is None:
        assert memory is not None, "without a limit every cut fits"
        assert limits is not None
        raise _does_not_fit(num_layers, stages, memory, limits)
    slowest = max(_costs(best, cost))

    def squared(stage: int, start: int, stop: int) -> float | None:
        found = cost(stage, start, stop)
        return None if found is None or found > slowest else found * found

    even = _least(num_layers, stages, squared, combine=lambda before, own: before + own)
    return best if even is None else even


def uniform_partition(num_layers: int, stages: int) -> tuple[int, ...]:
    """Return the same number of layers for each stage; if they do not divide, the stages in the middle take one more.

    >>> uniform_partition(32, 5)
    (6, 7, 7, 6, 6)

    Raises:
        PlanError: PARTITION_STAGES.
    """
    _check_stages(num_layers, stages)
    fewest, larger = divmod(num_layers, stages)
    start = (stages - larger) // 2
    return tuple(fewest + (start <= stage < start + larger) for stage in range(stages))


def check_partition(counts: Sequence[int], *, num_layers: int, stages: int) -> tuple[int, ...]:
    """Check the numbers of layers per stage that a user listed, and return them.

    Raises:
        PlanError: PARTITION_STAGES, PARTITION_LAYERS.
    """
    _check_stages(num_layers, stages)
    listed = ", ".join(map(str, counts))
    if len(counts) != stages:
        raise PlanError.of(
            code="PARTITION_STAGES",
            key="parallel.partition",
            message=f"partition=[{listed}] has {len(counts)} numbers for pipeline × virtual_stages = {stages} stages",
            fix=f"Give {stages} numbers that add up to num_hidden_layers={num_layers}",
        )
    if sum(counts) != num_layers or min(counts) < 1:
        even = ", ".join(map(str, uniform_partition(num_layers, stages)))
        raise PlanError.of(
            code="PARTITION_LAYERS",
            key="parallel.partition",
            message=f"partition=[{listed}] adds up to {sum(counts)}, not to num_hidden_layers={num_layers}"
            if sum(counts) != num_layers
            else f"partition=[{listed}] leaves stage {min(range(stages), key=counts.__getitem__)} without a layer",
            fix=f"Give {stages} numbers of at least 1 that add up to {num_layers}, such as [{even}]",
        )
    return tuple(counts)


def stage_layers(counts: Sequence[int]) -> tuple[range, ...]:
    """Return the layers of each stage.

    >>> stage_layers((2, 3))
    (range(0, 2), range(2, 5))
    """
    stops = list(accumulate(counts, initial=0))
    return tuple(range(start, stop) for start, stop in pairwise(stops))


def _whole_numbers(costs: Sequence[float]) -> list[int]:
    """Return costs as exact integer multiples of one unit, so that sums do not depend on their order."""
    ratios = [cost.as_integer_ratio() for cost in costs]
    unit = lcm(*(denominator for _, denominator in ratios))
    return [numerator * (unit // denominator) for numerator, denominator in ratios]


def _check_stages(num_layers: int, stages: int) -> None:
    if stages < 1:
        raise ValueError(f"{stages} stages: at least one is needed")
    if stages > num_layers:
        raise PlanError.of(
            code="PARTITION_STAGES",
            key="parallel.pipeline",
            message=f"pipeline × virtual_stages = {stages} stages exceed num_hidden_layers={num_layers}: each stage "
            "needs at least one layer",
            fix=f"Set them so that their product is at most {num_layers}",
        )


def _of_each_stage(capacity: float | Sequence[float], stages: int) -> list[float]:
    limits = [capacity] * stages if isinstance(capacity, int | float) else list(capacity)
    if len(limits) != stages:
        raise ValueError(f"{len(limits)} capacities are given for {stages} stages")
    return limits


def _least(
    num_layers: int, stages: int, cost: _RunCost, *, combine: Callable[[float, float], float]
) -> tuple[int, ...] | None:
    """Return the partition of least combined cost, or None if no partition is possible.

    The best partition of the first n layers into s stages is the best one of the first k into s - 1, for some k, and a run of
    n - k layers. The search for k starts at the shortest run, and ends when the run alone costs more than the best partition
    so far, or no longer fits. Of equally good runs the longest is taken.
    """
    best: list[float | None] = [0] + [None] * num_layers
    starts: list[list[int]] = []
    for stage in range(stages):
        found: list[float | None] = [None] * (num_layers + 1)
        chosen = [0] * (num_layers + 1)
        for stop in range(stage + 1, num_layers - (stages - stage - 1) + 1):
            for start in range(stop - 1, stage - 1, -1):
                own = cost(stage, start, stop)
                known = found[stop]
                if own is None or (known is not None and own > known):
                    break
                before = best[start]
                if before is not None and (known is None or combine(before, own) <= known):
                    found[stop], chosen[stop] = combine(before, own), start
        best = found
        starts.append(chosen)
    if best[num_layers] is None:
        return None
    stop, counts = num_layers, []
    for chosen in reversed(starts):
        counts.append(stop - chosen[stop])
        stop = chosen[stop]
    return tuple(reversed(counts))


def _costs(counts: Sequence[int], cost: _RunCost) -> list[float]:
    runs = enumerate(stage_layers(counts))
    return [found for stage, run in runs if (found := cost(stage, run.start, run.stop)) is not None]


def _does_not_fit(num_layers: int, stages: int, memory: StageMemory, limits: Sequence[float]) -> PlanError:
    """Return the error that names the fullest stage of the partition that comes closest to fitting."""

    def fullness(stage: int, start: int, stop: int) -> float:
        return memory(stage, start, stop) / limits[stage]

    closest = _least(num_layers, stages, fullness, combine=max)
    assert closest is not None, "nothing forbids a cut here"
    runs = stage_layers(closest)
    tightest = max(range(stages), key=lambda stage: fullness(stage, runs[stage].start, runs[stage].stop))
    needed = memory(tightest, runs[tightest].start, runs[tightest].stop)
    return PlanError.of(
        code="PARTITION_MEMORY",
        key="parallel.partition",
        message=f"no partition of {num_layers} layers into {stages} stages fits: in the closest one, "
        f"[{', '.join(map(str, closest))}], stage {tightest} needs {format_bytes(needed)} of "
        f"{format_bytes(limits[tightest])}",
        fix="Raise pipeline or tensor, or lower per_device_train_batch_size or sequence_length",
    )
