"""Few micro-batches of a pipeline show what all of them need."""

from __future__ import annotations

from typing import Any

import pytest
from staged_run import peaks_of, staged_plan

from toolkit.memory.engines.settings import engine_settings
from toolkit.memory.engines.step_program import StepProgram, representative_micro_batches, step_program
from toolkit.memory.trace.run import trace_ranks
from toolkit.pipeline_schedule import actions, build_schedule

EIGHT_LAYERS: dict[str, Any] = {"num_hidden_layers": 8}


@pytest.mark.parametrize(
    ("name", "virtual", "micro_batches"),
    [
        pytest.param("1f1b", 1, 40, marks=pytest.mark.full),
        ("interleaved", 2, 40),
        ("zb-h1", 1, 40),
        pytest.param("zb-h1", 2, 40, marks=pytest.mark.full),
        ("gpipe", 1, 12),
    ],
)
def test_few_micro_batches_show_what_all_need(tmp_path, name, virtual, micro_batches):
    values = {"pipeline": 4, "virtual_stages": virtual, "config": EIGHT_LAYERS}
    plan = staged_plan(tmp_path, **values, pipeline_schedule=name, train={"gradient_accumulation_steps": micro_batches})
    assert (representative_micro_batches(name, pp=4, micro_batches=micro_batches) < micro_batches) == (name != "gpipe")
    traces = trace_ranks(plan, marks_modules=False)
    schedule = build_schedule(name, pp=4, micro_batches=micro_batches, virtual_stages=virtual)
    for pp_rank in range(4):
        every = StepProgram(actions=actions(schedule, pp_rank), num_micro_batches=micro_batches, reduces_once=True)
        settings = engine_settings(plan)
        assert peaks_of(traces[pp_rank], settings, step_program(plan, pp_rank)) == peaks_of(
            traces[pp_rank], settings, every
        )


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("name", "virtual"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zb-h1", 3)]
)
def test_few_micro_batches_are_as_many_in_flight_as_all(pp, name, virtual):
    for micro_batches in range(1, 7 * pp):
        few = representative_micro_batches(name, pp=pp, micro_batches=micro_batches)
        assert few <= micro_batches
        peaks = [
            [made.peak_in_flight(rank) for rank in range(pp)]
            for made in (
                build_schedule(name, pp=pp, micro_batches=count, virtual_stages=virtual)
                for count in (few, micro_batches)
            )
        ]
        assert peaks[0] == peaks[1]
