"""Shapes that several ranks draw, each for itself and all alike."""

from hypothesis import HealthCheck, Phase, settings

# The same draws on every rank, and none that depend on what happened on one of them.
TOGETHER = settings(
    max_examples=25,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
