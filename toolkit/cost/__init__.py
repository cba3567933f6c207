"""The time of a training step, foreseen from what its traces compute and what its engine moves."""

from toolkit.cost.step import StepTime, step_time

__all__ = ["StepTime", "step_time"]
