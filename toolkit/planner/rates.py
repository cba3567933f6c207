"""Rules for the learning rate where the global batch is changed: offered with their sources, never applied unasked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# How the learning rate follows a batch that grows by a factor k, by the value of `train.learning_rate_scaling`.
_RULES = (
    ("sqrt", 0.5, "arXiv 2205.10287 for Adam, arXiv 1404.5997"),
    ("linear", 1.0, "arXiv 1706.02677, for SGD"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRule:
    """A learning rate for twice the global batch.

    Args:
        name: Value of `train.learning_rate_scaling`.
        batch: Sequences of a step for which the learning rate is meant now.
        learning_rate: The rate now.
        doubled: The rate that the rule gives for twice the batch.
        source: Where the rule comes from.
    """

    name: str
    batch: int
    learning_rate: float
    doubled: float
    source: str

    def __str__(self) -> str:
        return (
            f"learning rate: if you double the batch of {self.batch}, the {self.name} rule makes {self.learning_rate:.3g} "
            f"{self.doubled:.3g} ({self.source}); not applied: train.learning_rate_scaling={self.name} with "
            f"train.learning_rate_reference_batch_size={self.batch} does"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as a JSON object."""
        return {
            "rule": self.name,
            "reference_batch_size": self.batch,
            "learning_rate": self.learning_rate,
            "learning_rate_of_twice_the_batch": self.doubled,
            "source": self.source,
        }


def scaling_rules(batch: int, learning_rate: float) -> tuple[ScalingRule, ...]:
    """Return what each rule would make of the learning rate for twice the global batch.

    >>> [round(rule.doubled / rule.learning_rate, 2) for rule in scaling_rules(64, 1e-5)]
    [1.41, 2.0]
    """
    return tuple(
        ScalingRule(
            name=name, batch=batch, learning_rate=learning_rate, doubled=learning_rate * 2**power, source=source
        )
        for name, power, source in _RULES
    )
