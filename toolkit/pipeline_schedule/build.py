"""The one entry to all schedules, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

from toolkit.config.fields import PipelineSchedule
from toolkit.errors import PlanError, Problem, raise_all
from toolkit.pipeline_schedule.gpipe import gpipe
from toolkit.pipeline_schedule.interleaved import interleaved
from toolkit.pipeline_schedule.one_f_one_b import one_f_one_b
from toolkit.pipeline_schedule.schedule import Schedule
from toolkit.pipeline_schedule.zero_bubble import zero_bubble

SCHEDULES: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)

_BUILDERS: dict[PipelineSchedule, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zero_bubble,
}


def build_schedule(name: PipelineSchedule, *, pp: int, micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Build a schedule.

    Args:
        name: `gpipe`, `1f1b`, `interleaved` or `zb-h1`.
        pp: Number of pipeline ranks.
        micro_batches: Micro-batches per step and data-parallel replica: the steps of gradient accumulation.
        virtual_stages: Chunks of each rank: 1 for `gpipe` and `1f1b`, at least 2 for `interleaved`, any for `zb-h1`.

    Raises:
        PlanError: SCHEDULE_UNKNOWN, SCHEDULE_SIZE, SCHEDULE_VIRTUAL_STAGES.
    """
    raise_all(PlanError, schedule_problems(name, pp=pp, micro_batches=micro_batches, virtual_stages=virtual_stages))
    return _BUILDERS[name](pp, micro_batches, virtual_stages)


def schedule_problems(name: str, *, pp: int, micro_batches: int, virtual_stages: int) -> Iterator[Problem]:
    """Yield the problems of a schedule without building it; arguments and codes are those of `build_schedule`."""
    if name not in SCHEDULES:
        yield Problem(
            code="SCHEDULE_UNKNOWN",
            key="parallel.pipeline_schedule",
            message=f"{name} is not a known pipeline schedule",
            fix=f"Name one of {', '.join(SCHEDULES)}",
        )
    sizes = (
        ("pipeline ranks", "parallel.pipeline", pp),
        ("micro-batches", "train.gradient_accumulation_steps", micro_batches),
        ("stages a rank", "parallel.virtual_stages", virtual_stages),
    )
    for what, key, value in sizes:
        if value < 1:
            yield Problem(
                code="SCHEDULE_SIZE",
                key=key,
                message=f"a schedule of {value} {what}: a pipeline has at least one rank, one stage on each and one micro-batch",
                fix="Give it 1 or more",
            )
    if name == "interleaved" and virtual_stages == 1:
        yield Problem(
            code="SCHEDULE_VIRTUAL_STAGES",
            key="parallel.virtual_stages",
            message="virtual_stages=1, one stage a rank, with pipeline_schedule=interleaved: there is nothing to interleave",
            fix="Give each rank 2 stages or more (virtual_stages), or take the schedule 1f1b",
        )
    elif name in ("gpipe", "1f1b") and virtual_stages > 1:
        yield Problem(
            code="SCHEDULE_VIRTUAL_STAGES",
            key="parallel.virtual_stages",
            message=f"virtual_stages={virtual_stages}, {virtual_stages} stages a rank, with pipeline_schedule={name}: its ranks have "
            "one each",
            fix="Give each rank one stage (virtual_stages=1), or take the schedule interleaved or zb-h1",
        )
