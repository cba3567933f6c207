"""Schedules of all kinds and sizes, for the tests of this folder."""

from __future__ import annotations

from hypothesis import strategies as st

from toolkit.config.fields import PipelineSchedule
from toolkit.pipeline_schedule import SCHEDULES, Schedule, build_schedule

VIRTUAL_STAGES: dict[PipelineSchedule, tuple[int, int]] = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved": (2, 4),
    "zb-h1": (1, 4),
}


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(SCHEDULES))
    return build_schedule(
        name,
        pp=draw(st.integers(1, 8)),
        micro_batches=draw(st.integers(1, 24)),
        virtual_stages=draw(st.integers(*VIRTUAL_STAGES[name])),
    )
