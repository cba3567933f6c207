"""Layers of a stage, in one or several runs."""

from __future__ import annotations

import pytest

from toolkit.pipeline_schedule import build_schedule, stage_of_rank


@pytest.mark.parametrize(("pp", "virtual_stages"), [(2, 1), (2, 3), (4, 2)])
def test_every_layer_and_end_is_held_once_where_the_schedule_runs_it(pp: int, virtual_stages: int) -> None:
    name = "interleaved" if virtual_stages > 1 else "1f1b"
    schedule = build_schedule(name, pp=pp, micro_batches=pp, virtual_stages=virtual_stages)
    partition = [stage % 3 + 1 for stage in range(schedule.num_stages)]
    held = [stage_of_rank(partition, rank, pp=pp) for rank in range(pp)]
    starts = [sum(partition[:stage]) for stage in range(schedule.num_stages)]
    for stage, (start, count) in enumerate(zip(starts, partition, strict=True)):
        rank, chunk = schedule.place(stage)
        assert held[rank].chunks[chunk] == range(start, start + count)
    assert sorted(layer for part in held for run in part.chunks for layer in run) == list(range(sum(partition)))
    assert [part.ends for part in held] == [("embedding",), *[()] * (pp - 2), ("norm", "head")]
