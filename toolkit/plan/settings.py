"""What a plan decides: every value that a job may leave open, closed, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from toolkit.plan.batch import Batch
from toolkit.spec.job import Attention, Precision

Source = Literal["job", "default", "derived", "deepspeed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One value of the plan and where it came from.

    Args:
        key: Dotted path as in the job file.
        value: JSON value.
        source: `job`: written by the person; `default`: fixed rule; `derived`: follows from other values;
            `deepspeed`: from the job's `deepspeed` section.
        reason: One clause.
    """

    key: str
    value: Any
    source: Source
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every open value of a job, decided.

    Args:
        batch: The batch equation.
        gradient_checkpointing: Share of the decoder layers that recompute, 0 to 1.
        learning_rate: Peak, after `learning_rate_scaling`.
        warmup_ratio: Share of all steps; used when `warmup_steps` is None.
        max_steps: Optimizer steps; None when epochs set the length.
        num_train_epochs: Passes over the data; None when `max_steps` sets the length.
        eval_steps: Steps between evaluations; None without evaluation data.
        sub_group_size: Parameters a ZeRO-3 optimizer sub-group.
    """

    batch: Batch
    per_device_eval_batch_size: int
    sequence_length: int
    init: Literal["pretrained", "random"]
    precision: Precision
    gradient_accumulation_dtype: Precision
    zero_stage: int
    gradient_checkpointing: float
    attention: Attention
    learning_rate: float
    min_learning_rate_ratio: float | None
    warmup_steps: int | None
    warmup_ratio: float | None
    max_steps: int | None
    num_train_epochs: float | None
    save_steps: int
    save_total_limit: int
    eval_steps: int | None
    offload_ratio: float
    sub_group_size: int
    reduce_bucket_size: int

    def to_dict(self) -> dict[str, Any]:
        """Gives a JSON object; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Settings:
        """Reads what `to_dict` wrote."""
        return cls(**{**value, "batch": Batch(**value["batch"])})
