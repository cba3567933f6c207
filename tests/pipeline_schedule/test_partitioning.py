"""The cut of layers into stages: no other is better, and it heeds the memory of every stage."""

from __future__ import annotations

import doctest
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toolkit.pipeline_schedule.partitioning
from toolkit.errors import PlanError
from toolkit.pipeline_schedule import build_schedule, check_partition, partition, stage_layers, uniform_partition
from toolkit.units import GIB

costs_of_layers = st.lists(st.floats(0, 10) | st.sampled_from([1.0, 2.0]), min_size=1, max_size=9)


def test_doctests() -> None:
    result = doctest.testmod(toolkit.pipeline_schedule.partitioning)
    assert (result.failed, result.attempted) == (0, 4)


def every_cut(num_layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, num_layers), stages - 1):
        yield tuple(stop - start for start, stop in itertools.pairwise((0, *cuts, num_layers)))


def loads(counts: Sequence[int], costs: Sequence[float], first: float, last: float) -> list[float]:
    found = [sum(costs[layer] for layer in layers) for layers in stage_layers(counts)]
    found[0] += first
    found[-1] += last
    return found


@settings(deadline=None, max_examples=150)
@given(costs_of_layers, st.data(), st.floats(0, 10), st.floats(0, 10))
def test_no_cut_is_better(costs: list[float], data: st.DataObject, first: float, last: float) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    found = partition(costs, stages, first=first, last=last)
    assert len(found) == stages
    assert sum(found) == len(costs)
    assert min(found) >= 1
    slowest = [max(loads(cut, costs, first, last)) for cut in every_cut(len(costs), stages)]
    assert max(loads(found, costs, first, last)) == pytest.approx(min(slowest))


@settings(deadline=None, max_examples=150)
@given(costs_of_layers, st.data())
def test_no_cut_that_fits_is_better(costs: list[float], data: st.DataObject) -> None:
    """Every layer of every stage has a size of its own, and every stage a capacity."""
    stages = data.draw(st.integers(1, len(costs)))
    sizes = data.draw(
        st.lists(
            st.lists(st.integers(0, 5), min_size=len(costs), max_size=len(costs)), min_size=stages, max_size=stages
        )
    )
    capacity = data.draw(st.lists(st.integers(1, 14), min_size=stages, max_size=stages))

    def memory(stage: int, start: int, stop: int) -> float:
        return sum(sizes[stage][start:stop])

    fitting = [
        cut
        for cut in every_cut(len(costs), stages)
        if all(memory(s, run.start, run.stop) <= capacity[s] for s, run in enumerate(stage_layers(cut)))
    ]
    if not fitting:
        with pytest.raises(PlanError) as error:
            partition(costs, stages, memory=memory, capacity=capacity)
        assert error.value.codes == ("PARTITION_MEMORY",)
        return
    found = partition(costs, stages, memory=memory, capacity=capacity)
    assert found in fitting
    best = min(max(loads(cut, costs, 0, 0)) for cut in fitting)
    assert max(loads(found, costs, 0, 0)) == pytest.approx(best)


def test_equally_fast_cuts_are_even() -> None:
    """The long layer rules the time, whatever the others do."""
    assert partition([1, 1, 1, 1, 1, 1, 6], 4) == (2, 2, 2, 1)
    assert partition([0.1] * 30, 4, last=0.1) == (7, 8, 8, 7), "sums of 0.1 differ in their last bits"


def test_the_first_and_last_stage_hold_fewer_layers() -> None:
    assert partition([1.0] * 32, 4, first=1.0, last=3.0) == (8, 9, 9, 6)


def test_a_large_model_takes_milliseconds() -> None:
    in_flight = [16 - stage for stage in range(16)]
    start = time.process_time()
    found = partition(
        [1.0] * 126,
        16,
        last=1.6,
        memory=lambda stage, first, stop: (stop - first) * (10 + in_flight[stage]),
        capacity=8 * 26,
    )
    seconds = time.process_time() - start
    assert sum(found) == 126
    assert max(found) == 8
    assert seconds < 0.5, "some 35 ms on an idle core"


def test_only_the_partition_that_knows_memory_fits() -> None:
    """1F1B's first stage holds four micro-batches, its last one, but also logits.

    In DeepSpeed's issue 1378 the stages of a GPT of equal layers peak at 10,824, 8,041 and 10,981 MB.
    """
    schedule = build_schedule("1f1b", pp=4, micro_batches=8)
    state, activations, embedding, logits = 2.0 * GIB, 0.5 * GIB, 2.0 * GIB, 4.0 * GIB
    capacity = 36.0 * GIB

    def memory(stage: int, start: int, stop: int) -> float:
        held = (stop - start) * (state + activations * schedule.peak_in_flight(stage))
        return held + (embedding if stage == 0 else 0) + (logits + embedding if stage == 3 else 0)

    def fits(counts: Sequence[int]) -> bool:
        return all(memory(s, run.start, run.stop) <= capacity for s, run in enumerate(stage_layers(counts)))

    costs = [1.0] * 40
    blind = partition(costs, 4, last=2.0)
    assert blind == (10, 10, 11, 9)
    assert not fits(blind)
    assert not fits(uniform_partition(40, 4))
    aware = partition(costs, 4, last=2.0, memory=memory, capacity=capacity)
    assert fits(aware)
    assert aware == (8, 10, 12, 10)
    assert [cut for cut in every_cut(40, 4) if fits(cut) and max(loads(cut, costs, 0, 2.0)) < 12] == []
    with pytest.raises(PlanError) as error:
        partition(costs, 4, memory=memory, capacity=capacity - 3 * GIB)
    assert error.value.codes == ("PARTITION_MEMORY",)
    assert "[8, 10, 11, 11], stage 1 needs 35.00 GiB of 33.00 GiB" in str(error.value)


@given(st.integers(1, 40), st.data())
def test_uniform_differs_by_one_layer(num_layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, num_layers))
    found = uniform_partition(num_layers, stages)
    assert sum(found) == num_layers
    assert max(found) - min(found) <= 1
    assert max(partition([1.0] * num_layers, stages)) == max(found)


def test_a_list_is_taken_as_it_is() -> None:
    assert check_partition([3, 5], num_layers=8, stages=2) == (3, 5)
    assert stage_layers((3, 5)) == (range(3), range(3, 8))


@pytest.mark.parametrize(
    ("counts", "stages", "code", "part"),
    [
        ([4, 4], 3, "PARTITION_STAGES", "Give 3 numbers that add up to num_hidden_layers=8"),
        ([4, 5], 2, "PARTITION_LAYERS", "adds up to 9, not to num_hidden_layers=8"),
        ([8, 0], 2, "PARTITION_LAYERS", "leaves stage 1 without a layer"),
        ([9, -1], 2, "PARTITION_LAYERS", "such as [4, 4]"),
        ([1] * 9, 9, "PARTITION_STAGES", "9 stages exceed num_hidden_layers=8"),
    ],
)
def test_a_list_that_cannot_be(counts: list[int], stages: int, code: str, part: str) -> None:
    with pytest.raises(PlanError) as error:
        check_partition(counts, num_layers=8, stages=stages)
    assert error.value.codes == (code,)
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": 0}, "at least one"),
        ({"memory": lambda *_: 1.0}, "go together"),
        ({"capacity": 1.0}, "go together"),
        ({"costs": [1.0, -1.0]}, "below 0"),
        ({"memory": lambda *_: 1.0, "capacity": [1.0]}, "1 capacities are given for 2 stages"),
    ],
)
def test_a_call_that_makes_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(**({"costs": [1.0, 1.0], "stages": 2} | arguments))


def test_more_stages_than_layers() -> None:
    with pytest.raises(PlanError) as error:
        partition([1.0], 2)
    assert error.value.codes == ("PARTITION_STAGES",)
