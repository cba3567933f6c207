"""Pipeline schedules: which rank computes what in which order, checked by simulation; and the partition of layers."""

from toolkit.pipeline_schedule.bubble import bubble_fraction
from toolkit.pipeline_schedule.build import SCHEDULES, build_schedule, schedule_problems
from toolkit.pipeline_schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    Message,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from toolkit.pipeline_schedule.lowering import actions, evaluation_actions
from toolkit.pipeline_schedule.partitioning import (
    StageMemory,
    check_partition,
    partition,
    stage_layers,
    uniform_partition,
)
from toolkit.pipeline_schedule.schedule import Schedule
from toolkit.pipeline_schedule.simulate import Durations, Span, Timeline, simulate
from toolkit.pipeline_schedule.stage import StageSpec, stage_of_rank

__all__ = [
    "SCHEDULES",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Compute",
    "Durations",
    "Forward",
    "Instruction",
    "Message",
    "ReceiveActivation",
    "ReceiveGradient",
    "Schedule",
    "SendActivation",
    "SendGradient",
    "Span",
    "StageMemory",
    "StageSpec",
    "Timeline",
    "actions",
    "bubble_fraction",
    "build_schedule",
    "check_partition",
    "evaluation_actions",
    "partition",
    "schedule_problems",
    "simulate",
    "stage_layers",
    "stage_of_rank",
    "uniform_partition",
]
