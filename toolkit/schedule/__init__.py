"""Pipeline schedules: who computes what in which order, proven on paper; and the cut of layers into stages."""

from toolkit.schedule.bubble import bubble_fraction
from toolkit.schedule.build import SCHEDULES, build_schedule, schedule_problems
from toolkit.schedule.instructions import (
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
from toolkit.schedule.messages import actions
from toolkit.schedule.partitioning import StageMemory, check_partition, partition, stage_layers, uniform_partition
from toolkit.schedule.schedule import Schedule
from toolkit.schedule.simulate import Durations, Span, Timeline, simulate

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
    "Timeline",
    "actions",
    "bubble_fraction",
    "build_schedule",
    "check_partition",
    "partition",
    "schedule_problems",
    "simulate",
    "stage_layers",
    "uniform_partition",
]
