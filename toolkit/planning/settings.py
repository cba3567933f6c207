"""The decisions of a plan: every value that a job may leave open, and the reason for it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from toolkit.config.fields import (
    Count,
    Fraction,
    NonNegativeCount,
    OpenFraction,
    PipelineSchedule,
    ZeroStage,
    adapter_of,
)
from toolkit.config.job import Attention, Dtype, ExpertSharding, Job, Kernels, Precision, ProblemType, Task
from toolkit.planning.batch import Batch

Source = Literal["job", "default", "derived", "deepspeed", "planner"]

# Bytes per element.
ITEMSIZES: Mapping[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One value of the plan and where it came from.

    Args:
        key: Dotted path as in the job file.
        value: Value, as JSON has it.
        source: Origin. `job`: written by the user; `default`: fixed rule; `derived`: follows from other values;
            `deepspeed`: from the job's `deepspeed` section; `planner`: the fastest that the planner found for the cluster.
        reason: Reason, as one clause.
    """

    key: str
    value: Any
    source: Source
    reason: str


def read_choices(value: Any) -> tuple[Choice, ...]:
    """Read the choices of a plan; raises as `Settings.from_dict` does."""
    made = tuple(Choice(**choice) for choice in value)
    adapter_of(list[Choice]).validate_json(json.dumps(value), strict=True)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every open value of a job, decided.

    Args:
        batch: The batch equation.
        gradient_checkpointing: Share of the decoder layers that recompute, 0 to 1; 1 / n of every n-th.
        learning_rate: Peak, after `learning_rate_scaling`.
        warmup_ratio: Share of all steps that warm up; used when `warmup_steps` is None.
        max_steps: Optimizer steps; None when epochs set the length.
        num_train_epochs: Passes over the data; None when `max_steps` sets the length.
        save_steps: Steps between checkpoints, or below 1 their share of the run.
        eval_steps: Steps between evaluations, or below 1 their share of the run; None without evaluation data.
        sub_group_size: Parameters per ZeRO-3 optimizer sub-group.
        sequence_parallel: Whether tensor ranks hold shards of the sequence between sharded layers.
        experts: How tensor ranks share stacked experts.
        kernels: Implementation of norms and gated activations.
        pipeline_schedule: Order of the passes of a pipeline.
        virtual_stages: Stages of each rank of a pipeline.
        partition: Decoder layers of each stage, first to last; empty without a pipeline.
        task: What the model is trained to do.
        freeze_vision: Whether a model that reads images keeps what turns them into numbers.
        images_per_sample: Images of each sample that the estimate counts; 0 for text alone.
        image_size: Their width and height in pixels; empty for text alone.
        num_labels: Classes of a classifier, or values of a regression; 0 for other tasks.
        problem_type: What a classifier of sequences learns; None for other tasks.
    """

    batch: Batch
    per_device_eval_batch_size: Count
    sequence_length: Count
    init: Literal["pretrained", "random"]
    precision: Precision
    gradient_accumulation_dtype: Dtype
    zero_stage: ZeroStage
    gradient_checkpointing: Fraction
    attention: Attention
    learning_rate: PositiveFloat
    min_learning_rate_ratio: Fraction | None
    warmup_steps: NonNegativeCount | None
    warmup_ratio: Fraction | None
    max_steps: Count | None
    num_train_epochs: PositiveFloat | None
    save_steps: Count | OpenFraction
    save_total_limit: Count
    eval_steps: Count | OpenFraction | None
    offload_ratio: Fraction
    sub_group_size: PositiveInt
    reduce_bucket_size: PositiveInt
    sequence_parallel: bool = False
    experts: ExpertSharding = "sliced"
    kernels: Kernels = "eager"
    pipeline_schedule: PipelineSchedule = "1f1b"
    virtual_stages: Count = 1
    partition: tuple[Count, ...] = ()
    task: Task = "causal-lm"
    freeze_vision: bool = False
    images_per_sample: NonNegativeCount = 0
    image_size: tuple[Count, ...] = ()
    num_labels: NonNegativeCount = 0
    problem_type: ProblemType | None = None

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that each evaluation has."""
        if not self.num_labels:
            return ("loss",)
        return ("loss", "mse", "mae") if self.problem_type == "regression" else ("loss", "accuracy", "f1")

    @property
    def dtype(self) -> Dtype:
        """Data type of parameters and gradients."""
        return dtype_of(self.precision)

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter and of its gradient."""
        return ITEMSIZES[self.dtype]

    @property
    def splits_backward(self) -> bool:
        """True if stages compute the gradients of weights separately from those of their inputs."""
        return self.pipeline_schedule == "zb-h1"

    @property
    def reduces_once(self) -> bool:
        """True if a pipeline keeps whole gradients and reduces them at the end of a step, rather than after each pass."""
        return self.zero_stage < 2

    @property
    def sums_in_fp32(self) -> bool:
        """True if 16-bit gradients are accumulated in fp32."""
        return self.gradient_accumulation_dtype == "fp32" and self.dtype != "fp32"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Settings:
        """Read what `to_dict` wrote.

        Raises:
            TypeError: A key is missing or unknown.
            ValueError: A value has the wrong type or lies outside its range.
        """
        lists = {name: tuple(value.get(name, ())) for name in ("partition", "image_size")}
        made = cls(**{**value, "batch": Batch(**value["batch"]), **lists})
        adapter_of(cls).validate_json(json.dumps(value), strict=True)
        return made

    def check(self) -> None:
        """Raise the errors of `from_dict` where a value has the wrong type or lies outside its range."""
        Settings.from_dict(self.to_dict())


def steps_between(interval: float, num_steps: int) -> int:
    """Return an interval in steps, which below 1 is a share of the run.

    Source:
        transformers trainer_callback.py TrainerState.compute_steps.
    """
    return int(interval) if interval >= 1 else math.ceil(num_steps * interval)


def dtype_of(precision: Precision) -> Dtype:
    """Return the data type of parameters and gradients: that of the precision, and bf16 under fp8."""
    return "bf16" if precision == "fp8" else precision


# Keys of train that a plan copies as they are written.
_TAKEN = (
    "sequence_length",
    "per_device_eval_batch_size",
    "precision",
    "gradient_accumulation_dtype",
    "attention",
    "kernels",
    "min_learning_rate_ratio",
    "warmup_steps",
    "warmup_ratio",
    "max_steps",
    "num_train_epochs",
    "save_steps",
    "save_total_limit",
    "eval_steps",
)


def disagreements(job: Job, settings: Settings, choices: Sequence[Choice]) -> list[str]:
    """Return where settings contradict the job or the recorded choices, as in a plan that was edited in part.

    Nothing tells which of them is right, and commands would read different ones.
    """
    train, batch = job.train, settings.batch
    scaled = train.learning_rate_scaling != "none"
    values: dict[str, tuple[Any, Any]] = {
        **{f"train.{name}": (getattr(train, name), getattr(settings, name)) for name in _TAKEN},
        "train.per_device_train_batch_size": (train.per_device_train_batch_size, batch.micro),
        "train.gradient_accumulation_steps": (train.gradient_accumulation_steps, batch.accumulation),
        "train.gradient_checkpointing": (train.recomputed_share, settings.gradient_checkpointing),
        "train.train_batch_size": (train.train_batch_size, batch.train),
        "train.learning_rate": (None if scaled else train.learning_rate, settings.learning_rate),
        "parallel.zero_stage": (job.parallel.zero_stage, settings.zero_stage),
        "parallel.sequence_parallel": (job.parallel.sequence_parallel, settings.sequence_parallel),
        "parallel.experts": (job.parallel.experts, settings.experts),
        "parallel.pipeline_schedule": (job.parallel.pipeline_schedule, settings.pipeline_schedule),
        "parallel.virtual_stages": (job.parallel.virtual_stages, settings.virtual_stages),
        "model.task": (job.model.task, settings.task),
        "train.freeze_vision": (train.freeze_vision, settings.freeze_vision),
        "train.images_per_sample": (train.images_per_sample, settings.images_per_sample),
        "train.image_size": (train.image_size and list(train.image_size), list(settings.image_size)),
        "model.num_labels": (job.model.num_labels, settings.num_labels),
        "model.problem_type": (job.model.problem_type, settings.problem_type),
        "model.init": (job.model.init, settings.init),
        "deepspeed.zero_optimization.sub_group_size": (None, settings.sub_group_size),
        "deepspeed.zero_optimization.reduce_bucket_size": (None, settings.reduce_bucket_size),
    }
    recorded = {choice.key: choice.value for choice in choices}
    key = "train.gradient_checkpointing"
    if isinstance(recorded.get(key), dict) and recorded[key] == train.recomputation.model_dump(mode="json"):
        recorded[key] = train.recomputed_share  # a section, of which the settings have the share
    found = [
        f"{key}={said} in the {part}, {settled} in the settings"
        for key, (given, settled) in values.items()
        for part, said in (("job", given), ("choices", recorded.get(key)))
        if said is not None and said != settled
    ]
    if batch.dp_size != job.row_groups:
        found.append(f"the job's cluster has {job.row_groups} data-parallel ranks, the settings {batch.dp_size}")
    return found
