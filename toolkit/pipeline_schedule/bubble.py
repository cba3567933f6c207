"""Share of a step in which pipeline ranks idle: in closed form, if there is one.

All stages are assumed to take equally long and messages no time. `simulate` needs neither assumption.
"""

from __future__ import annotations

from toolkit.config.fields import PipelineSchedule
from toolkit.errors import PlanError, raise_all
from toolkit.pipeline_schedule.build import build_schedule, schedule_problems
from toolkit.pipeline_schedule.simulate import Durations, simulate


def bubble_fraction(
    name: PipelineSchedule,
    *,
    pp: int,
    micro_batches: int,
    virtual_stages: int = 1,
    durations: Durations | None = None,
) -> float:
    """Return the bubble of a schedule: in closed form, or from a simulation if there is none.

    >>> bubble_fraction("1f1b", pp=4, micro_batches=16)
    0.15789473684210525
    >>> bubble_fraction("zb-h1", pp=4, micro_batches=16)
    0.058823529411764705
    >>> bubble_fraction("zb-h1", pp=4, micro_batches=16, virtual_stages=2)
    0.030303030303030304

    Args:
        name: Name of the schedule.
        pp: Number of pipeline ranks.
        micro_batches: Micro-batches of one step.
        virtual_stages: Chunks of each rank.
        durations: Durations of each stage, without transfers; three equal thirds if None.

    Returns:
        Idle share of the time of all ranks, 0 to 1.

    Raises:
        PlanError: As in `build_schedule`.
    """
    raise_all(PlanError, schedule_problems(name, pp=pp, micro_batches=micro_batches, virtual_stages=virtual_stages))
    each = durations or Durations()
    idle = idle_time(name, pp=pp, micro_batches=micro_batches, virtual_stages=virtual_stages, durations=each)
    if idle is None or each.transfer:
        schedule = build_schedule(name, pp=pp, micro_batches=micro_batches, virtual_stages=virtual_stages)
        return simulate(schedule, each).bubble_fraction
    busy = micro_batches * virtual_stages * (each.forward + each.backward_input + each.backward_weight)
    return idle / (busy + idle)


def idle_time(
    name: PipelineSchedule, *, pp: int, micro_batches: int, virtual_stages: int, durations: Durations
) -> float | None:
    """Return how long each rank idles in a step, in closed form; None if there is none.

    For ZB-H1 the paper has (pp - 1)(F + B - W), with the times of forward pass, input gradient and weight gradient. W fills
    each gap, and must be the shortest of the three: a longer W delays the stages before, and fills no more than the others.
    With fewer micro-batches than ranks there is less to fill with, and with several chunks every round has a gap as well.

    Source:
        arXiv 2104.04473, sections 2.2.1 and 2.2.2; arXiv 2401.10241, table 1. The rest follows from simulations.
    """
    whole = durations.forward + durations.backward_input + durations.backward_weight
    missing = max(0, pp - micro_batches)
    if name in ("gpipe", "1f1b"):
        return (pp - 1) * whole
    if name == "interleaved":
        return (pp - 1) * whole + missing * (virtual_stages - 1) * whole
    if missing and virtual_stages > 1:
        return None
    unfilled = (pp - 1) * (durations.forward + durations.backward_input)
    filled = min(durations.forward, durations.backward_input, durations.backward_weight)
    return unfilled - (min(pp, micro_batches) - 1) * filled
